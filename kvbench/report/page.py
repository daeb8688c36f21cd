"""The page that every HTML report is: one file, no external resources, light and dark, with its own JSON inside."""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from kvbench.report.tables import TextTable, Tone, host_rows, provenance_table
from kvbench.results.codec import to_json
from kvbench.results.document import Document


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A drawing for the page: an `<svg>` element made by `line_plot_svg`, and what to see in it."""

    svg: str
    caption: str = ""


def page(
    document: Document[Any],
    *,
    title: str,
    verdict: str,
    tone: Tone = "neutral",
    details: Sequence[str] = (),
    figures: Sequence[Figure] = (),
    tables: Sequence[TextTable] = (),
) -> str:
    """The HTML text: verdict first, then `details` as a list, figures, tables, warnings, origins, host, raw JSON.

    All strings are escaped here; only `Figure.svg` is taken as markup.
    """
    from jinja2 import Environment
    from markupsafe import Markup

    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True)
    return environment.from_string(_TEMPLATE).render(
        document=document,
        title=title,
        verdict=verdict,
        tone=tone,
        details=details,
        figures=[(Markup(figure.svg), figure.caption) for figure in figures],
        tables=[table for table in (*tables, provenance_table(document)) if table.rows],
        host_rows=host_rows(document),
        style=Markup(_STYLE),
        json_base64=base64.b64encode(to_json(document).encode()).decode(),
    )


_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --faint: #5c6570; --paper: #fff; --line: #d8dde3; --card: #f5f7f9;
  --good: #137a3f; --bad: #b3261e; --unsure: #8a5a00; --neutral: #1b1f24; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ed; --faint: #9aa4af; --paper: #14171a; --line: #353b42;
  --card: #1d2226; --good: #5fd08c; --bad: #ff8a80; --unsure: #f0b849; --neutral: #e6e9ed; } }
body { color: var(--ink); background: var(--paper); font: 16px/1.5 system-ui, sans-serif; max-width: 70rem;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.3rem; } h2 { font-size: 1.05rem; margin: 2rem 0 .4rem; }
.verdict { font-size: 1.25rem; font-weight: 600; padding: .8rem 1rem; background: var(--card);
  border-left: .35rem solid currentColor; }
.good { color: var(--good); } .bad { color: var(--bad); } .unsure { color: var(--unsure); }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; }
th, td { padding: .25rem .9rem .25rem 0; text-align: right; border-bottom: 1px solid var(--line);
  font-variant-numeric: tabular-nums; vertical-align: top; }
th { border-bottom: 2px solid var(--line); } td:not(.left) { white-space: nowrap; }
.left { text-align: left; } .main td { font-weight: 600; }
figure { margin: 1.5rem 0; } figure svg { max-width: 100%; height: auto; color: var(--ink); }
figcaption, .note, footer { color: var(--faint); font-size: .85rem; }
code { font-size: .9em; overflow-wrap: anywhere; }
"""

_TEMPLATE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{{ title }}</title>
<style>{{ style }}</style>
</head>
<body>
<h1>{{ title }}</h1>
<p class="verdict {{ tone }}">{{ verdict }}</p>
{% if document.interrupted %}
<p class="unsure">Interrupted: this holds only what was measured until then.</p>
{% endif %}
{% if details %}
<ul>
{% for line in details %}
<li>{{ line }}</li>
{% endfor %}
</ul>
{% endif %}
{% for svg, caption in figures %}
<figure>
{{ svg }}
{% if caption %}
<figcaption>{{ caption }}</figcaption>
{% endif %}
</figure>
{% endfor %}
{% if document.warnings %}
<h2>Warnings</h2>
<ul>
{% for warning in document.warnings %}
<li class="unsure"><code>{{ warning.code }}</code> {{ warning.message }}; {{ warning.remedy }}</li>
{% endfor %}
</ul>
{% endif %}
{% for table in tables %}
<h2>{{ table.title }}</h2>
<div class="scroll">
<table>
<thead><tr>
{% for column in table.columns %}
<th scope="col"{% if table.is_left(loop.index0) %} class="left"{% endif %}>{{ column }}</th>
{% endfor %}
</tr></thead>
<tbody>
{% for row in table.rows %}
<tr{% if loop.index0 in table.highlight %} class="main"{% endif %}>
{% for cell in row %}
<td{% if table.is_left(loop.index0) %} class="left"{% endif %}>{{ cell }}</td>
{% endfor %}
</tr>
{% endfor %}
</tbody>
</table>
</div>
{% if table.note %}
<p class="note">{{ table.note }}</p>
{% endif %}
{% endfor %}
<h2>How this was made</h2>
<table>
<tbody>
{% for name, value in host_rows %}
<tr><td class="left">{{ name }}</td><td class="left"><code>{{ value }}</code></td></tr>
{% endfor %}
</tbody>
</table>
<footer>
<p><a download="{{ document.kind }}.json"
href="data:application/json;base64,{{ json_base64 }}">Download the result as JSON</a>;
<code>kvbench report {{ document.kind }}.json</code> draws it again.</p>
</footer>
</body>
</html>
"""
