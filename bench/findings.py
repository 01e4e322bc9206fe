"""The exhaustive proof's findings for one format. `bench.proof` fills them in, `bench.bounds_page` shows them."""

from dataclasses import dataclass, field

from quant.split import Split

INPUT_CHECKS = (
    "head is the correctly rounded input",
    "error is within the bound",
    "exact input is kept, with tail 0",
    "non-finite head is kept, with tail 0",
    "move by zero keeps head and tail",
    "decode in the encoding graph is the same",
)
EAGER_CHECK = "eager equals compiled"
PAIR_CHECKS = ("pair decodes to a finite value", "decode rises with the tail")
CHECKS = (*INPUT_CHECKS, EAGER_CHECK, *PAIR_CHECKS)

Relative = dict[int, float]  # exponent of |w| → worst relative error


@dataclass
class Findings:
    """Counts and maxima so far. `examples` holds the bits of the first input that failed each check.

    `tightness` is the largest ratio of an error to the bound of its own binade.
    """

    format: Split
    violations: dict[str, int] = field(default_factory=lambda: dict.fromkeys(CHECKS, 0))
    examples: dict[str, str] = field(default_factory=dict)
    inputs: int = 0
    finite: int = 0
    exact: int = 0
    pairs: int = 0
    worst_in_ulps: float = 0.0
    tightness: float = 0.0
    relative: Relative = field(default_factory=dict)

    @property
    def total_violations(self) -> int:
        return sum(self.violations.values())

    def blame(self, check: str, count: int, example: str) -> None:
        self.violations[check] += count
        self.examples.setdefault(check, example)
