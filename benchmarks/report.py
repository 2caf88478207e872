"""What a benchmark returns: tables, charts and notes; written as NAME.json, NAME.md and NAME-CHART.png.

A benchmark fills in what it measured; `command` adds the machine and the options. The JSON has everything, unrounded:
the fields of Report, with each table as `title`, `columns` and `rows`. How fair figures are got: `turns`.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

Value = str | int | float | None


@dataclass(frozen=True)
class Table:
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Value]]

    def markdown(self) -> str:
        """Under its title, with columns that also line up as plain text; numbers to the right."""
        cells = [list(self.columns), *([_cell(value) for value in row] for row in self.rows)]
        columns = list(zip(*cells, strict=True))
        widths = [max(3, *map(len, column)) for column in columns]
        numeric = [self._is_numeric(index) for index in range(len(columns))]
        lines = [
            " | ".join(
                text.rjust(width) if right else text.ljust(width)
                for text, width, right in zip(line, widths, numeric, strict=True)
            )
            for line in cells
        ]
        rule = " | ".join("-" * (width - right) + ":" * right for width, right in zip(widths, numeric, strict=True))
        body = "\n".join(f"| {line} |" for line in [lines[0], rule, *lines[1:]])
        return f"**{self.title}**\n\n{body}"

    def _is_numeric(self, column: int) -> bool:
        values = [row[column] for row in self.rows]
        return any(isinstance(value, int | float) for value in values) and not any(isinstance(v, str) for v in values)


@dataclass(frozen=True)
class Chart:
    """`series`: a line, or a bar of each group, by its label; its values stand over those of `x`. None: a gap."""

    name: str
    title: str
    x_label: str
    y_label: str
    x: Sequence[str | float]
    series: Mapping[str, Sequence[float | None]]
    kind: Literal["line", "bar"] = "line"
    log_x: bool = False

    def draw(self, path: Path) -> None:
        """Raises ImportError without matplotlib."""
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 4), layout="constrained")
        FigureCanvasAgg(figure)
        axes = figure.add_subplot(title=self.title, xlabel=self.x_label, ylabel=self.y_label)
        heights = {label: [float("nan") if y is None else y for y in ys] for label, ys in self.series.items()}
        if self.kind == "line":
            for label, ys in heights.items():
                axes.plot(self.x, ys, marker="o", label=label)
            if self.log_x:
                axes.set_xscale("log", base=2)
                axes.set_xticks([x for x in self.x if not isinstance(x, str)], labels=[str(x) for x in self.x])
        else:
            width = 0.8 / len(heights)
            for number, (label, ys) in enumerate(heights.items()):
                left = (number - (len(heights) - 1) / 2) * width
                axes.bar([place + left for place in range(len(self.x))], ys, width, label=label)
            axes.set_xticks(range(len(self.x)), labels=[str(x) for x in self.x])
        axes.set_ylim(bottom=0)
        axes.grid(axis="y", alpha=0.3)
        if len(heights) > 1:
            axes.legend()
        figure.savefig(path, dpi=120)


@dataclass(frozen=True)
class Report:
    """`data`: what other programs read, such as the figures of each repeat; a benchmark documents its keys.

    `failures`: sentences on what must not be; with any, the command ends with code 1, once all is written.
    """

    name: str
    title: str
    tables: Sequence[Table]
    charts: Sequence[Chart] = ()
    notes: Sequence[str] = ()
    failures: Sequence[str] = ()
    data: Mapping[str, Any] = field(default_factory=dict)
    machine: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    def markdown(self) -> str:
        parts = [f"# {self.title}", *(table.markdown() for table in self.tables)]
        if self.notes:
            parts.append("\n".join(f"- {note}" for note in self.notes))
        if self.failures:
            parts.append("\n".join(f"- FAILED: {failure}" for failure in self.failures))
        facts = [f"{key} {value}" for key, value in self.machine.items()]
        chosen = [f"{key}={value}" for key, value in self.options.items()]
        parts += [f"{head}: {', '.join(items)}" for head, items in (("Machine", facts), ("Options", chosen)) if items]
        return "\n\n".join(parts) + "\n"

    def save(self, folder: Path) -> list[Path]:
        """Write the files into `folder`, which is made, and return their paths. Without matplotlib: no charts."""
        folder.mkdir(parents=True, exist_ok=True)
        written = [folder / f"{self.name}.json", folder / f"{self.name}.md"]
        written[0].write_text(json.dumps(asdict(self), indent=1, default=str) + "\n")
        written[1].write_text(self.markdown())
        try:
            for chart in self.charts:
                path = folder / f"{self.name}-{chart.name}.png"
                chart.draw(path)
                written.append(path)
        except ImportError:
            print("no charts without matplotlib: install the extra `bench`", file=sys.stderr)
        return written


def _cell(value: Value) -> str:
    """Two decimals for ratios and what is like them; those of larger numbers say nothing, smaller ones need more."""
    if value is None:
        return ""
    if isinstance(value, float):
        if 0 < abs(value) < 0.1:
            return f"{value:.4f}"
        return f"{value:.2f}" if abs(value) < 100 else f"{value:.1f}" if abs(value) < 1000 else f"{value:.0f}"
    return str(value)
