"""`quell plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from quell.cli import options, terminal
from quell.cli.options import GOALS, goal, limit, output, the_run, user
from quell.cli.users import rows_of_users
from quell.costs import DEVICES, TimeLimit
from quell.errors import QuellError
from quell.files import require_writable
from quell.planning import make_plan, named_plan
from quell.planning.questions import choices_for_steps, plan_for_rmse
from quell.planning.users import user_limits
from quell.run import Run
from quell.schemes import BEST, FIXED, named
from quell.schemes.randomness import Indices
from quell.show import plots, tables, words

_USERS = (
    "How many users there are, or a table with the user of each example (.csv, .tsv, .txt, .npy): batches are drawn of "
    "users, and --batch-size counts users."
)
_COLUMN = "The column of that table with the users' ids; sender,receiver where examples have several users."
_DEVICES = f"{', '.join(DEVICES)}, or measured"


def plan(
    epsilon: options.Epsilon,
    delta: options.Delta,
    examples: Annotated[int | None, the_run("Examples in the training set.")] = None,
    batch_size: Annotated[int | None, the_run("Examples per step.")] = None,
    epochs: Annotated[int | None, the_run("Passes over the data.")] = None,
    steps: Annotated[int | None, the_run("Instead of both: compare ways to spend this many steps.")] = None,
    momentum: options.Momentum = 0.0,
    weight_decay: options.WeightDecay = 1.0,
    schedule: options.Schedule = None,
    adaptive: options.Adaptive = False,
    objective: Annotated[str | None, goal(f"{GOALS} Default: training, or rmse with --target-rmse.")] = None,
    memory: options.Memory = "4",
    draws: options.Draws = 16,
    parameters: options.ModelSize = None,
    noise_share: Annotated[float | None, limit("Largest share of a step's time for noise: 0.03 is 3%.")] = None,
    step_seconds: Annotated[float | None, limit("How long a step takes without noise, for --noise-share.")] = None,
    device: Annotated[str | None, limit(f"Hardware to assume for --noise-share: {_DEVICES}. Default: h200.")] = None,
    sampling: options.Schemes = "best",
    fast: Annotated[bool, goal(f"Fixed batches (--sampling {FIXED.name}): an answer in seconds.", "--fast")] = False,
    users: Annotated[str | None, user(_USERS)] = None,
    user_column: Annotated[str | None, user(_COLUMN)] = None,
    rows_per_user: Annotated[int | None, user("With a table: rows that a user brings to a step. Default: 1.")] = None,
    separation: Annotated[
        int | None, user("Batches of examples: fewest steps between two participations of a user.")
    ] = None,
    participations: Annotated[int | None, user("Batches of examples: most participations of a user.")] = None,
    mechanism: Annotated[
        str | None, goal("Certify this one instead of searching: a row of the table, 'blt d=2'.")
    ] = None,
    target_rmse: Annotated[float | None, goal("Find the smallest epsilon with this RMSE, from --epsilon on.")] = None,
    save: Annotated[Path | None, output("Write the plan to this file, for quell verify.")] = None,
    plot: options.Plot = None,
    html: Annotated[Path | None, output("Write the plan as one interactive web page.")] = None,
    as_json: options.AsJson = False,
) -> None:
    """Compare mechanisms for a training run and recommend one.

    Give --examples (or --users), --batch-size, --epochs, --epsilon and --delta; everything else has a default.
    """
    if examples is None and users is None:
        raise QuellError("a plan needs --examples, or --users for privacy per user")
    table = _table(users, user_column, rows_per_user)
    unused: dict[str, object] = {"--batch-size": batch_size, "--epochs": epochs, "--target-rmse": target_rmse}
    unused |= {
        "--mechanism": mechanism,
        "--save": save,
        "--plot": plot,
        "--html": html,
        "--rows-per-user": rows_per_user,
    }
    if steps is not None and (given := [name for name, value in unused.items() if value is not None]):
        raise QuellError(
            f"--steps only compares ways to spend them, so it does not go with {', '.join(given)}: choose one, then "
            "plan it with --batch-size and --epochs"
        )
    if mechanism is not None and target_rmse is not None:
        raise QuellError("--target-rmse searches for a mechanism, so it does not go with --mechanism: drop one")
    require_writable([save, plot, html])
    if plot is not None:
        plots.require_picture(plot)
    known = options.data_of(locals()) | {
        "sampling": _sampling(sampling, fast),
        "objective": objective or ("training" if target_rmse is None else "rmse"),
        "time_limit": _time_limit(noise_share, step_seconds, parameters, device),
    }
    if table is not None:
        known[f"{table[0]}s"] = len(table[1])
    elif users is not None:
        known["users"] = int(users)
    if steps is not None:
        _show_choices(steps, known, as_json)
        return
    if batch_size is None or epochs is None:
        raise QuellError("a plan needs --batch-size and --epochs, or --steps alone to find them")
    run = Run.from_data(**known)
    with terminal.progress() as advance:
        if mechanism is not None:
            chosen = named_plan(run, mechanism)
        else:
            chosen = make_plan(run, advance) if target_rmse is None else plan_for_rmse(run, target_rmse, advance)
        if save is not None:
            chosen.save(save)
        if plot is not None:
            chosen.draw(plot)
        if html is not None:
            chosen.write_page(html)
        answers = None if as_json else chosen.answers
        limits = None if table is None else user_limits(chosen, table[1], rows_per_user or 1, table[2])
    if answers is None:
        content = {**chosen.as_dict(), "meaning": chosen.meaning.as_dict()}
        terminal.print_json(content | ({} if limits is None else {"user_limits": limits.as_dict()}))
        return
    tables.print_plan(chosen, answers, terminal.console)
    if limits is not None:
        terminal.console.print(tables.limits_table(limits))
        for sentence in words.user_limits(limits):
            terminal.say(sentence)
    terminal.say_written([save, plot, html])
    if not run.user_level:
        for line in words.next_lines(save):
            terminal.say(line)


def _show_choices(steps: int, known: dict[str, Any], as_json: bool) -> None:
    with terminal.progress() as advance:
        choices = choices_for_steps(steps, progress=advance, **known)
    if as_json:
        terminal.print_json([choice.as_dict() for choice in choices])
        return
    terminal.console.print(tables.choices_table(choices))
    terminal.say(words.best_choice(min(choices, key=lambda choice: choice.error_per_example)))


def _is_number(text: str) -> bool:
    return text.isdecimal() and len(text) < 19  # Python refuses to read long ones


def _table(users: str | None, column: str | None, rows_per_user: int | None) -> tuple[str, Indices, int] | None:
    """What `rows_of_users` finds, where a table was given; refuses options that would do nothing."""
    if users is not None and not _is_number(users):
        return rows_of_users(Path(users), column)
    for name, given in (("--user-column", column), ("--rows-per-user", rows_per_user)):
        if given is not None:
            raise QuellError(f"{name} is for a table of user ids (--users ids.csv): give both")
    return None


def _sampling(sampling: str, fast: bool) -> str:
    if not fast:
        return sampling
    if named(sampling) not in (BEST, (FIXED,)):
        raise QuellError(
            f"--fast means --sampling {FIXED.name}, so it does not go with --sampling {sampling}: drop one"
        )
    return FIXED.name


def _time_limit(
    share: float | None, step_seconds: float | None, parameters: int | None, device: str | None
) -> TimeLimit | None:
    if share is None:
        for name, given in (("--step-seconds", step_seconds), ("--device", device)):
            if given is not None:
                raise QuellError(f"{name} is for --noise-share, the part of a step that noise may take: give both")
        return None
    if step_seconds is None or parameters is None:
        raise QuellError("--noise-share needs --step-seconds and --parameters as well")
    return TimeLimit.of_share(share, step_seconds, parameters, device or "h200")
