"""Non-negative least squares with relative weights, for times that are a sum of costs which cannot be negative."""

import itertools
import math
from collections.abc import Sequence
from statistics import median


def relative_fit(features: Sequence[Sequence[float]], targets: Sequence[float]) -> tuple[float, ...]:
    """Coefficients c ≥ 0 that minimise Σ((features·c − target) / target)².

    Dividing by the target makes an error of 10 % weigh the same for a copy of 64 KiB and for one of 256 MiB; without
    it the largest point alone would decide every coefficient. Targets should be medians: over raw samples the same
    weights pull the fit towards the fast ones.
    """
    if not targets or len(features) != len(targets) or any(not target > 0 for target in targets):
        raise ValueError("a fit needs as many feature rows as targets, at least one, and every target above zero")
    rows = [[value / target for value in row] for row, target in zip(features, targets, strict=True)]
    return nonnegative_least_squares(rows, [1.0] * len(rows))


def median_residual_ratio(fitted: Sequence[float], measured: Sequence[float]) -> float:
    """Median of |measured − fitted| / measured; with as many coefficients as points it is zero and proves nothing."""
    return median(abs(real - model) / real for model, real in zip(fitted, measured, strict=True))


def nonnegative_least_squares(rows: Sequence[Sequence[float]], targets: Sequence[float]) -> tuple[float, ...]:
    """The c ≥ 0 that minimises |rows·c − targets|²: the best unconstrained solution over every subset of columns.

    Exact, and cheap for the two to four columns used here (2ⁿ small systems); Lawson and Hanson's active-set method
    would find the same one. A column that is zero, or that depends on the others, gets a zero coefficient.
    """
    num_columns = len(rows[0])
    norms = [math.sqrt(sum(row[column] ** 2 for row in rows)) for column in range(num_columns)]
    best = (0.0,) * num_columns
    best_error = _squared_error(rows, best, targets)
    for size in range(1, num_columns + 1):
        for subset in itertools.combinations([column for column in range(num_columns) if norms[column] > 0], size):
            # columns span many decades (1, tokens, tokens²): unit columns keep the normal equations solvable
            scaled = [[row[column] / norms[column] for column in subset] for row in rows]
            solution = _normal_equations(scaled, targets)
            if solution is None or min(solution) < 0:
                continue
            candidate = [0.0] * num_columns
            for column, value in zip(subset, solution, strict=True):
                candidate[column] = value / norms[column]
            error = _squared_error(rows, candidate, targets)
            if error < best_error:
                best, best_error = tuple(candidate), error
    return best


def _squared_error(rows: Sequence[Sequence[float]], solution: Sequence[float], targets: Sequence[float]) -> float:
    return math.fsum(
        (sum(value * c for value, c in zip(row, solution, strict=True)) - target) ** 2
        for row, target in zip(rows, targets, strict=True)
    )


def _normal_equations(rows: Sequence[Sequence[float]], targets: Sequence[float]) -> list[float] | None:
    """Solution of (AᵀA)x = Aᵀb by elimination with pivoting, or None when the columns depend on each other."""
    size = len(rows[0])
    matrix = [
        [math.fsum(row[i] * row[j] for row in rows) for j in range(size)]
        + [math.fsum(row[i] * target for row, target in zip(rows, targets, strict=True))]
        for i in range(size)
    ]
    for step in range(size):
        pivot = max(range(step, size), key=lambda candidate: abs(matrix[candidate][step]))
        if abs(matrix[pivot][step]) < 1e-13:
            return None
        matrix[step], matrix[pivot] = matrix[pivot], matrix[step]
        for below in range(step + 1, size):
            factor = matrix[below][step] / matrix[step][step]
            matrix[below] = [a - factor * b for a, b in zip(matrix[below], matrix[step], strict=True)]
    solution = [0.0] * size
    for step in reversed(range(size)):
        known = sum(matrix[step][column] * solution[column] for column in range(step + 1, size))
        solution[step] = (matrix[step][size] - known) / matrix[step][step]
    return solution
