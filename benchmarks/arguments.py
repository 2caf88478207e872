"""Options of several numbers: `--batch 1,2,4`. An empty text is an empty list."""


def counts(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]


def numbers(text: str) -> list[float]:
    return [float(part) for part in text.split(",") if part]
