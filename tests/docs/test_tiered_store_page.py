import contextlib
import io
import re
from pathlib import Path

PAGE = (Path(__file__).parents[2] / "docs" / "tiered-store.md").read_text()


def test_the_example_of_the_page_prints_what_the_page_says() -> None:
    program, shown = re.findall(r"```(?:python)?\n(.*?)```", PAGE, flags=re.DOTALL)[:2]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(program, "docs/tiered-store.md", "exec"), {})
    assert printed.getvalue() == shown
