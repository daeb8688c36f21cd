from hypothesis import given
from hypothesis import strategies as st

from kvbench.engines.builtin.stop_text import StopText

SMALL = st.text(alphabet="ab", max_size=12)


@given(st.lists(SMALL, max_size=8), st.lists(st.text(alphabet="ab", min_size=1, max_size=4), max_size=3))
def test_pieces_show_the_same_as_the_whole_text_cut_at_the_first_stop(pieces: list[str], stops: list[str]) -> None:
    whole = "".join(pieces)
    # the stop that is complete first wins; of those that are complete at once, the one that begins first
    ends = [whole.find(stop) + len(stop) for stop in stops if stop in whole]
    filtered = StopText(stops)
    shown = ""
    for piece in "".join(pieces):  # one character at a time, as the slowest stream
        shown += filtered.push(piece)
    shown += filtered.rest()
    if not ends:
        assert (shown, filtered.found) == (whole, False)
    else:
        done = whole[: min(ends)]
        assert filtered.found
        assert shown == done[: min(len(done) - len(stop) for stop in stops if done.endswith(stop))]


@given(SMALL, st.text(alphabet="ab", min_size=1, max_size=4))
def test_what_is_shown_early_never_holds_a_beginning_of_the_stop(text: str, stop: str) -> None:
    filtered = StopText([stop])
    shown = filtered.push(text)
    if not filtered.found:
        held = text[len(shown) :]
        assert stop.startswith(held)
        assert not any(stop.startswith(shown[start:] + held) for start in range(len(shown)))
