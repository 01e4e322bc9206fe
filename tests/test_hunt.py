"""In any course of use, a compiled optimizer has the bits of an eager one that remembers nothing.

`make hunt` runs more and longer courses with more kinds of kernels. FLASHOPT_KNOWN lists rules and kinds to skip.
"""

from collections.abc import Iterator

import pytest
import torch
from courses import QUICK, Course
from uses import BF16, CONDITIONS, SHAPES

TestCourse = Course.TestCase
TestCourse.settings = QUICK


@pytest.fixture
def fresh_course() -> Iterator[Course]:
    """A course with an optimizer whose kernel has not been compiled yet."""
    course = Course()
    course.begin(kind="fresh AdamW", shapes=list(SHAPES), dtypes=(BF16,), seed=0)
    yield course
    course.teardown()


def take_steps(course: Course, condition: str) -> None:
    for seed, surroundings in enumerate((condition, "nothing", condition)):
        course.step(seed=seed, kinds=["plain"], size="ordinary", condition=surroundings, frozen="no gradient")
        course.both_hold_the_same()


@pytest.mark.parametrize("condition", CONDITIONS)
def test_a_first_step_compiles_under_any_condition(fresh_course: Course, condition: str):
    take_steps(fresh_course, condition)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_a_first_step_compiles_under_any_default_dtype(fresh_course: Course, dtype: torch.dtype):
    fresh_course.set_default_dtype(dtype=dtype)
    take_steps(fresh_course, "nothing")
