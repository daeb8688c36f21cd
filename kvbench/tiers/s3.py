"""Tier `s3`: one object per block in a bucket of any store that speaks S3, through aiobotocore."""

from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from kvbench.core.errors import MissingDependencyError, UsageError
from kvbench.tiers.remote import (
    RemoteTier,
    StoreClient,
    StoreError,
    StoreFullError,
    StoreInterruptedError,
    StoreUnreachableError,
)
from kvbench.tiers.remote_settings import remote_settings
from kvbench.tiers.spec import TierSpec

_T = TypeVar("_T")
_MISSING = {"404", "NoSuchKey", "NotFound"}
_FULL = {"507", "InsufficientStorage", "XMinioStorageFull", "QuotaExceeded", "EntityTooLarge"}


def open_s3(spec: TierSpec, *, block_bytes: int, name: str) -> RemoteTier:
    """The tier that `spec` spells; credentials come from the environment, as for every S3 client."""
    settings = remote_settings(spec)
    _imported(spec)
    if not spec.location.partition("/")[0]:
        raise UsageError(f"tier {spec} names no bucket; write it like s3://bucket/prefix")
    return RemoteTier(
        name,
        f"s3://{spec.location}",
        block_bytes,
        lambda: open_s3_client(spec, settings.concurrency, timeout_s=settings.timeout_s),
        timeout_s=settings.timeout_s,
        deadline_s=settings.deadline_s,
        concurrency=settings.concurrency,
        capacity_bytes=spec.size_bytes,
    )


async def open_s3_client(spec: TierSpec, depth: int, *, timeout_s: float) -> StoreClient:
    """A client with at most `depth` connections; it connects when it is first used."""
    get_session, config_of, errors = _imported(spec)
    options = dict(spec.options)
    bucket, _, prefix = spec.location.partition("/")
    endpoint = options.get("endpoint")
    context = get_session().create_client(
        "s3",
        endpoint_url=endpoint,
        region_name=options.get("region") or ("us-east-1" if endpoint else None),
        config=config_of(
            max_pool_connections=depth,
            connect_timeout=timeout_s,
            read_timeout=timeout_s,
            retries={"total_max_attempts": 1},  # the tier decides what is asked again, within its deadline
            # The envelope carries a checksum of its own, and several stores refuse trailing ones.
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
            s3={"addressing_style": "path" if endpoint else "auto"},
        ),
    )
    client = S3Client(context, bucket, f"{prefix.strip('/')}/" if prefix.strip("/") else "", errors)
    await client.start()
    return client


class S3Client:
    """Values as objects of one bucket under one prefix."""

    def __init__(self, context: Any, bucket: str, prefix: str, errors: "_Errors") -> None:
        self._context, self._bucket, self._prefix, self._errors = context, bucket, prefix, errors
        self._client: Any = None

    async def start(self) -> None:
        self._client = await self._done(self._context.__aenter__())

    async def put(self, name: str, *parts: bytes | memoryview) -> None:
        await self._done(self._client.put_object(**self._object(name), Body=b"".join(parts)))

    async def get(self, name: str) -> bytes | None:
        return await self._there(self._body(**self._object(name)))

    async def head(self, name: str, num_bytes: int) -> tuple[bytes, int] | None:
        return await self._there(self._start_of(name, num_bytes))

    async def delete(self, names: Sequence[str]) -> list[bool]:
        there = []
        for name in names:
            held = await self._there(self._client.head_object(**self._object(name)))
            if held is not None:
                await self._done(self._client.delete_object(**self._object(name)))
            there.append(held is not None)
        return there

    async def names(self) -> AsyncIterator[tuple[str, int]]:
        more: dict[str, str] = {}
        while True:
            page = await self._done(
                self._client.list_objects_v2(Bucket=self._bucket, Prefix=self._prefix, MaxKeys=1000, **more)
            )
            for one in page.get("Contents", ()):
                yield one["Key"][len(self._prefix) :], one["Size"]
            if not page.get("IsTruncated"):
                return
            more = {"ContinuationToken": page["NextContinuationToken"]}

    async def check(self) -> None:
        """Raises `StoreError` unless the bucket can be used."""
        await self._done(self._client.head_bucket(Bucket=self._bucket))

    async def close(self) -> None:
        await self._context.__aexit__(None, None, None)

    def _object(self, name: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": self._prefix + name}

    async def _body(self, **arguments: str) -> bytes:
        answer = await self._client.get_object(**arguments)
        async with answer["Body"] as body:
            value: bytes = await body.read()
        if len(value) != answer["ContentLength"]:
            raise StoreInterruptedError(f"s3://{self._bucket}: the body ended after {len(value)} bytes")
        return value

    async def _start_of(self, name: str, num_bytes: int) -> tuple[bytes, int]:
        answer = await self._client.get_object(**self._object(name), Range=f"bytes=0-{num_bytes - 1}")
        async with answer["Body"] as body:
            start: bytes = await body.read()
        # "bytes 0-127/4194432"; a store that ignores ranges answers with the whole object
        total = answer.get("ContentRange", "").rpartition("/")[2]
        return start[:num_bytes], int(total) if total.isdecimal() else int(answer["ContentLength"])

    async def _there(self, work: Coroutine[Any, Any, _T]) -> _T | None:
        """What `work` returns; None where the store says that there is no such object."""
        try:
            return await self._done(work)
        except _MissingError:
            return None

    async def _done(self, work: Coroutine[Any, Any, _T]) -> _T:
        """What `work` returns, with the client's errors as those of a store."""
        place, errors = f"s3://{self._bucket}", self._errors
        try:
            return await work
        except errors.answered as error:
            raise self._refusal(error, place) from error
        except errors.timed_out as error:
            raise TimeoutError(str(error)) from error
        except errors.unreachable as error:
            raise StoreUnreachableError(f"{place} cannot be reached ({error})") from error
        except errors.no_credentials as error:
            raise StoreError(f"{place}: {error}; set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY") from error
        except errors.interrupted as error:
            raise StoreInterruptedError(f"{place} broke off ({error or type(error).__name__})") from error

    def _refusal(self, error: Any, place: str) -> StoreError:
        code = str(error.response.get("Error", {}).get("Code", ""))
        status = str(error.response.get("ResponseMetadata", {}).get("HTTPStatusCode", ""))
        if code == "NoSuchBucket":
            return StoreError(f"{place} does not exist; make the bucket")
        if code in _MISSING or status == "404":
            return _MissingError(place)
        if code == "InvalidRange" or status == "416":  # of an object shorter than a header: nothing of ours
            return _MissingError(place)
        kind = StoreFullError if code in _FULL or status == "507" else StoreError
        return kind(f"{place} refuses ({' '.join(str(error).split())})")


class _MissingError(StoreError):
    """There is no such object."""


class _Errors:
    """Which exceptions of botocore and aiohttp mean what."""

    def __init__(self) -> None:
        import aiohttp
        from botocore import exceptions

        self.answered = exceptions.ClientError
        self.timed_out = (exceptions.ReadTimeoutError, exceptions.ConnectTimeoutError)
        self.unreachable = (exceptions.EndpointConnectionError, exceptions.ProxyConnectionError)
        self.no_credentials = (exceptions.NoCredentialsError, exceptions.PartialCredentialsError)
        # What else botocore says, a body that ends early, an answer that is no XML
        self.interrupted = (exceptions.BotoCoreError, aiohttp.ClientError, OSError, KeyError, ValueError)


def _imported(spec: TierSpec) -> tuple[Callable[[], Any], Callable[..., Any], _Errors]:
    try:
        from aiobotocore.config import AioConfig
        from aiobotocore.session import get_session
    except ImportError as error:
        raise MissingDependencyError("aiobotocore", "s3", f"tier {spec}") from error
    return get_session, AioConfig, _Errors()
