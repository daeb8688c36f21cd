"""Read keys of a `config.json` one by one, refusing what is missing, of the wrong type or absurd.

A key that a published file may leave out has the default that the Hugging Face class documents; every other key is
required, so nothing is guessed.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import cast

from kvbench.core.errors import UsageError

MAX_LAYERS = 2_048
MAX_COUNT = 2**24  # no width, head count, expert count or vocabulary of a real model comes near

_MISSING = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigFields:
    """The keys of one configuration; `source` is the file to name in an error, `prefix` where nested keys sit."""

    values: Mapping[str, object]
    source: str
    architecture: str
    prefix: str = ""

    def refuse(self, key: str, problem: str, remedy: str) -> UsageError:
        """The error to raise about `key`."""
        return UsageError(f"{self.source}: {self.prefix}{key} {problem}; {remedy}")

    def has(self, key: str) -> bool:
        """Whether the key is there and not null."""
        return self.values.get(key) is not None

    def with_defaults(self, **defaults: object) -> "ConfigFields":
        """The same keys, and for those a published file leaves out the default of its Hugging Face class."""
        return replace(self, values={**defaults, **self.values})

    def _value(self, keys: tuple[str, ...]) -> tuple[str, object]:
        for key in keys:
            if self.has(key):
                return key, self.values[key]
        return keys[0], _MISSING

    def _missing(self, key: str) -> UsageError:
        return self.refuse(
            key,
            f"is missing, and {self.architecture} cannot be built without it",
            "copy the model's own config.json, or add the key",
        )

    def count(self, *keys: str, default: int | None = None, minimum: int = 1, maximum: int = MAX_COUNT) -> int:
        """The whole number under the first of `keys` that is set; required unless a `default` is given."""
        key, value = self._value(keys)
        if value is _MISSING:
            if default is None:
                raise self._missing(key)
            return default
        return self._checked(key, value, minimum, maximum)

    def optional_count(self, *keys: str, minimum: int = 1, maximum: int = MAX_COUNT) -> int | None:
        """The whole number under the first of `keys` that is set, None where all are absent or null."""
        key, value = self._value(keys)
        return None if value is _MISSING else self._checked(key, value, minimum, maximum)

    def _checked(self, key: str, value: object, minimum: int, maximum: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.refuse(key, f"must be a whole number (got {_shown(value)})", "correct the value")
        if not minimum <= value <= maximum:
            allowed = f"between {minimum} and {maximum}"
            raise self.refuse(key, f"must be {allowed} (got {_shown(value)})", "correct the value")
        return value

    def flag(self, key: str, *, default: bool) -> bool:
        """The boolean under `key`."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refuse(key, f"must be true or false (got {_shown(value)})", "correct the value")
        return value

    def text(self, key: str) -> str | None:
        """The string under `key`, None where it is absent."""
        value = self.values.get(key)
        if value is not None and not isinstance(value, str):
            raise self.refuse(key, f"must be a string (got {_shown(value)})", "correct the value")
        return value

    def mapping(self, key: str) -> "ConfigFields | None":
        """The nested object under `key`, None where it is absent."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.refuse(key, f"must be an object (got {_shown(value)})", "correct the value")
        return replace(self, values=cast("Mapping[str, object]", value), prefix=f"{self.prefix}{key}.")

    def items(self, key: str) -> list[object] | None:
        """The list under `key`, None where it is absent."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, (list, tuple)):
            raise self.refuse(key, f"must be a list (got {_shown(value)})", "correct the value")
        return list(value)

    def counts(self, key: str, *, minimum: int = 0) -> list[int] | None:
        """The list of whole numbers under `key`, None where it is absent."""
        values = self.items(key)
        if values is None:
            return None
        return [self._checked(f"{key}[{i}]", value, minimum, MAX_COUNT) for i, value in enumerate(values)]

    def per_layer(self, key: str, num_layers: int) -> list[str] | None:
        """One word per layer under `key`, None where it is absent."""
        values = self.items(key)
        if values is None:
            return None
        self.check_length(key, len(values), num_layers)
        for i, value in enumerate(values):
            if not isinstance(value, str):
                raise self.refuse(f"{key}[{i}]", f"must be a string (got {_shown(value)})", "correct the value")
        return cast("list[str]", values)

    def check_length(self, key: str, length: int, num_layers: int) -> None:
        """Refuse a per-layer list that does not have one entry per layer."""
        if length != num_layers:
            raise self.refuse(
                key, f"has {length} entries for num_hidden_layers {num_layers}", "give one entry for every layer"
            )

    def num_layers(self) -> int:
        """How many decoder layers; multi-token-prediction layers are not among them."""
        layers = self.optional_count("num_hidden_layers", "n_layer", "n_layers", "num_layers", maximum=MAX_LAYERS)
        if layers is None:
            raise self.refuse(
                "num_hidden_layers",
                "is missing, so this is not a decoder with layers",
                "pass a language model's config",
            )
        return layers

    def heads(self) -> tuple[int, int]:
        """Query heads and KV heads; an absent num_key_value_heads means one per query head, as Hugging Face has it."""
        heads = self.count("num_attention_heads")
        kv_heads = self.count("num_key_value_heads", default=heads)
        self.check_groups("num_key_value_heads", heads, kv_heads)
        return heads, kv_heads

    def check_groups(self, key: str, heads: int, kv_heads: int) -> None:
        """Refuse KV heads that do not divide the query heads."""
        if heads % kv_heads:
            raise self.refuse(key, f"{kv_heads} does not divide num_attention_heads {heads}", "correct one of them")

    def head_dim(self, hidden_size: int, heads: int) -> int:
        """Width of a head: head_dim, else hidden_size / heads where that is whole."""
        head_dim = self.optional_count("head_dim")
        if head_dim is not None:
            return head_dim
        if hidden_size % heads:
            raise self.refuse(
                "head_dim",
                f"is missing and hidden_size {hidden_size} is no multiple of num_attention_heads {heads}",
                "add head_dim",
            )
        return hidden_size // heads


def _shown(value: object) -> str:
    """A value as an error message shows it: short and on one line."""
    text = repr(value) if not isinstance(value, int) or abs(value) < 10**20 else "a number of over 20 digits"
    return text if len(text) <= 60 else f"{text[:57]}..."
