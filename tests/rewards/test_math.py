import asyncio
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import rewards
from envs.killable import VerifierError
from envs.types import Missing, Score, Task
from rewards.math import same, unbox

EQUAL = [
    (r"\frac{1}{3}", r"\boxed{\frac{1}{3}}"),
    ("x**2-1", "(x-1)*(x+1)"),
    (r"\frac12", "0.5"),
    ("0.5", "1/2"),
    (r"\dfrac{3}{4}", r"so it is $\boxed{\tfrac{6}{8}}$."),
    ("1,000", "1000"),
    (r"2\sqrt{2}", r"\sqrt8"),
    (r"\frac{\sqrt{2}}{2}", r"\frac{1}{\sqrt{2}}"),
    (r"2\pi", "pi*2"),
    ("(1,2)", r"\left(1, \frac{4}{2}\right)"),
    (r"\{1,2\}", r"\{2,1\}"),
    ("1, 2", "2, 1"),
    ("5", "x = 5"),
    ("12", r"12\text{ cm}"),
    (r"\text{even}", "Even"),
    (r"1\frac{1}{2}", "3/2"),
    ("2^{100}", "1267650600228229401496703205376"),
    ("a^2+2ab+b^2", "(a+b)^2"),
    (r"\frac{x^2-1}{x-1}", "x+1"),
    (r"\sin^2 x+\cos^2 x", "1"),
    (r"\sin 2x", r"2\sin x\cos x"),
    ("90^\\circ", "90"),
    (r"(-\infty, 2]", r"(-\infty,2]"),
    (r"\boxed{7}", r"first \boxed{3}, then \boxed{7}"),
]
DIFFERENT = [
    (r"\boxed{\frac{1}{2}}", r"\boxed{\frac{1}{3}}"),
    (r"\frac{1}{2}", r"\boxed{\frac{1}{2}"),
    ("1/3", "0.3333333333"),
    ("(1,2)", "(2,1)"),
    ("(1,2]", "(1,2)"),
    ("1, 2", "1, 2, 3"),
    ("1, 1", "1, 2"),
    ("5", ""),
    ("5", "the answer is five"),
    ("5", r"\boxed{}"),
    ("5", "1/0"),
    ("5", "9**9**9**9"),
    ("x", "y"),
    (r"\sqrt{2}", "1.414"),
    ("5", "(" * 500),
    ("5", "5 6"),
    ("x+1", "x-1"),
    ("3", "1, 2, 3, 4, 5"),
    ("3", r"\boxed{3} or \boxed{4}"),
    ("3", "3 or 4"),
    ("3", r"\{3, 4\}"),
]


@pytest.mark.parametrize(("gold", "answer"), EQUAL)
def test_equal_answers_are_right(gold, answer):
    assert same(gold, answer)


@pytest.mark.parametrize(("gold", "answer"), DIFFERENT)
def test_other_answers_are_wrong_and_never_an_error(gold, answer):
    assert not same(gold, answer)


@pytest.mark.parametrize(("gold", "_"), EQUAL)
def test_every_reference_agrees_with_itself(gold, _):
    assert same(gold, gold)


@pytest.mark.parametrize("gold", ["", "  ", "see solution", r"\boxed{1", "1/0", "x +"])
def test_a_reference_that_is_no_expression_is_an_error_of_the_verifier(gold):
    with pytest.raises(VerifierError):
        same(gold, "1")


@pytest.mark.parametrize("gold", ["", "see solution"])
async def test_a_bad_reference_gives_no_verdict_rather_than_zero(gold, answered):
    verdict = await rewards.load("math")(Task.ask("t", "?", gold=gold), answered("1"))
    assert isinstance(verdict, Missing) and "reference" in verdict.reason


def test_the_reward_works_from_a_worker_thread(answered):
    found = []
    task = Task.ask("t", "?", gold=r"\frac{1}{3}")

    def work():
        found.append(asyncio.run(rewards.load("math")(task, answered(r"\boxed{\frac{1}{3}}"))))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found == [Score(1.0, {"math": 1.0})]


def test_the_last_box_counts_and_an_unclosed_one_is_no_answer():
    assert unbox(r"\boxed{1} \boxed{\frac{2}{3}}") == r"\frac{2}{3}"
    assert unbox(r"\boxed{1} \boxed{2") is None
    assert unbox("2") == "2"


numbers = st.integers(-50, 50)


@st.composite
def expressions(draw, depth=3):
    """A pair of notations, plain and LaTeX, of one random expression."""
    if depth == 0 or draw(st.booleans()):
        value = draw(st.one_of(numbers.map(str), st.sampled_from("xyz")))
        return (f"({value})", f"{{{value}}}")
    (a, b), (c, d) = draw(expressions(depth=depth - 1)), draw(expressions(depth=depth - 1))
    operator = draw(st.sampled_from("+-*"))
    return f"({c}{operator}{a})" if operator != "-" else f"({a}-{c})", (
        f"{{{b}{operator.replace('*', chr(92) + 'cdot ')}{d}}}"
    )


@settings(max_examples=100, deadline=None)
@given(expressions())
def test_notations_and_the_order_of_operands_do_not_matter(pair):
    plain, latex = pair
    assert same(plain, latex)


@settings(max_examples=100, deadline=None)
@given(expressions(), st.integers(1, 9))
def test_a_value_that_is_off_by_a_number_is_wrong(pair, shift):
    assert not same(pair[0], f"{pair[1]}+{shift}")


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet=r"0123456789xyz+-*/^(){}[]\|,.$ frac sqrt pi boxed", max_size=40))
def test_no_answer_makes_the_verifier_fail(answer):
    assert same("17", answer) in (True, False)
