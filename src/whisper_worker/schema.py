"""The interface as JSON Schema, and as the README's tables; both are made of the models in `request` and `output`.

`python -m whisper_worker.schema` prints the schema, with `--markdown` the tables.
"""

import argparse
import json
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import TypeAdapter

from whisper_worker.output import Item, Output, ResultsOutput, SegmentOutput, SegmentWordOutput, TranscriptOutput
from whisper_worker.request import Request

DIALECT = "https://json-schema.org/draft/2020-12/schema"
NULL = {"type": "null"}
BOUND_SIGNS = {"gt": ">", "ge": "≥", "lt": "<", "le": "≤"}

Json = dict[str, Any]


def schema() -> Json:
    """`input`: of a job's input; `output`: of what it gives, `item`: of what its stream is made of.

    `null` in an input counts as absent.
    """
    return {
        "input": {"$schema": DIALECT, **_input_schema()},
        "output": {"$schema": DIALECT, "title": "Output", **TypeAdapter(Output).json_schema()},
        "item": {"$schema": DIALECT, "title": "Item", **TypeAdapter(Item).json_schema()},
    }


def _input_schema() -> Json:
    whole = Request.model_json_schema()
    for kind in (whole, *whole["$defs"].values()):
        kind["properties"] = {name: _or_null(field) for name, field in kind["properties"].items()}
    return whole


def _or_null(field: Json) -> Json:
    if NULL in field.get("anyOf", ()):
        return field
    about = {key: value for key, value in field.items() if key in ("title", "description", "default")}
    return {"anyOf": [{key: value for key, value in field.items() if key not in about}, NULL], **about}


def markdown_tables() -> Iterator[str]:
    """The README's tables: of the input, and of the outputs."""
    yield _input_table()
    for heading, kind in (
        ("output", TranscriptOutput),
        ("of a segment", SegmentOutput),
        ("of a word", SegmentWordOutput),
        ("of several files", ResultsOutput),
    ):
        yield _output_table(heading, kind)


def _input_table() -> str:
    rows = ["| field | default | meaning |", "| --- | --- | --- |"]
    for name, field in Request.model_fields.items():
        default = "" if field.default is None else f"`{json.dumps(field.default)}`"
        rows.append(f"| `{name}` | {default} | {field.description}{_bounds(field.metadata)} |")
    return "\n".join(rows)


def _bounds(metadata: list[Any]) -> str:
    bounds = {sign: getattr(m, key) for m in metadata for key, sign in BOUND_SIGNS.items() if hasattr(m, key)}
    return f" ({', '.join(f'{sign} {bound:g}' for sign, bound in bounds.items())})" if bounds else ""


def _output_table(heading: str, kind: Any) -> str:
    rows = [f"| {heading} | type | meaning |", "| --- | --- | --- |"]
    for name, field in TypeAdapter(kind).json_schema()["properties"].items():
        rows.append(f"| `{name}` | {_type(field)} | {field.get('description', '')} |")
    return "\n".join(rows)


def _type(field: Mapping[str, Any]) -> str:
    if "anyOf" in field:
        return " or ".join(dict.fromkeys(_type(each) for each in field["anyOf"]))
    if "$ref" in field:
        return "object"
    if field["type"] == "array":
        return f"list of {_type(field['items'])}s"
    kind = str(field["type"])
    return {"integer": "whole number", "boolean": "true or false", "string": "text"}.get(kind, kind)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m whisper_worker.schema", description="The worker's interface.")
    parser.add_argument("--markdown", action="store_true", help="the README's tables instead of the JSON Schema")
    options = parser.parse_args()
    print("\n\n".join(markdown_tables()) if options.markdown else json.dumps(schema(), indent=2, ensure_ascii=False))


if __name__ == "__main__":
    main()
