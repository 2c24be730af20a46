"""`quell plan`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from quell.analysis.objective import DEFAULT_OBJECTIVE
from quell.cli import options, terminal
from quell.cli.options import GOALS, goal, limit, mechanism_names, output, the_run, user
from quell.cli.users import population
from quell.costs import DEVICES, USUAL, TimeLimit
from quell.errors import QuellError
from quell.files import PAGE, PLAN, PLOT, require_writable
from quell.planning import make_plan, named_plan
from quell.planning.questions import answers as asked_about
from quell.planning.questions import choices_for_steps, plan_for_rmse
from quell.planning.users import user_limits
from quell.run import Run
from quell.schemes import BEST, FIXED, named
from quell.show import plots, tables, words
from quell.show.limits import limit_sentences, limits_table
from quell.show.lines import next_lines

_DEVICES = f"{', '.join(DEVICES)}, or measured"


@options.shared(options.run_options)
def plan(
    given: options.Given,
    steps: Annotated[
        int | None,
        the_run("Instead of --batch-size and --epochs: compare ways to spend this many steps.", **options.COUNT),
    ] = None,
    sampling: options.Sampling = "best",
    objective: Annotated[str | None, goal(f"{GOALS} Default: {DEFAULT_OBJECTIVE}, or rmse with --target-rmse.")] = None,
    mechanism: Annotated[
        str | None,
        goal("Certify a row of the table instead of searching: 'blt d=2 h=88'.", autocompletion=mechanism_names),
    ] = None,
    target_rmse: Annotated[
        float | None, goal("Find the smallest epsilon with this RMSE, from --epsilon on.", **options.NUMBER)
    ] = None,
    fast: Annotated[bool, goal(f"Fixed batches (--sampling {FIXED.name}): an answer in seconds.", "--fast")] = False,
    memory: options.Memory = USUAL,
    draws: options.Draws = 16,
    parameters: options.ModelSize = None,
    noise_share: Annotated[
        float | None, limit("Largest share of a step's time for noise: 0.03 is 3%.", **options.NUMBER)
    ] = None,
    step_seconds: Annotated[
        float | None, limit("How long a step takes without noise, for --noise-share.", **options.NUMBER)
    ] = None,
    device: Annotated[str | None, limit(f"Hardware to assume for --noise-share: {_DEVICES}. Default: h200.")] = None,
    rows_per_user: Annotated[
        int | None, user("With a table: rows that a user brings to a step. Default: 1.", **options.COUNT)
    ] = None,
    explain: Annotated[
        bool, output("Also say why this one, what would change that, and what the words mean.", "--explain")
    ] = False,
    save: options.Save = None,
    plot: options.Plot = None,
    html: Annotated[Path | None, output("Write the plan as one interactive web page.")] = None,
    as_json: options.AsJson = False,
) -> None:
    """Compare mechanisms for a training run and recommend one, or certify the one that you name.

    Give --examples (or --users), --batch-size, --epochs and --epsilon; everything else has a default.
    """
    needed = options.data_needed(given) | {name: given[name] for name in ("epochs", "epsilon")}
    if steps is not None:
        needed = {name: value for name, value in needed.items() if name not in ("batch_size", "epochs")}
    options.require("plan", needed)
    _refuse_unused(
        steps,
        {name: given[name] for name in ("batch_size", "epochs")}
        | {"target_rmse": target_rmse, "mechanism": mechanism, "rows_per_user": rows_per_user}
        | {"save": save, "plot": plot, "html": html},
    )
    if mechanism is not None and target_rmse is not None:
        raise QuellError("--target-rmse searches for a mechanism, so it does not go with --mechanism: drop one")
    require_writable((save, PLAN), (plot, PLOT), (html, PAGE))
    if plot is not None:
        plots.require_picture(plot)
    counted, table = population(given["examples"], given["users"], given["user_column"])
    if rows_per_user is not None and table is None:
        raise QuellError("--rows-per-user is for a table of user ids (--users ids.csv): give both")
    limits = {"memory": memory, "draws": draws, "parameters": parameters}
    known = options.data_of(given | limits | {"sampling": _sampling(sampling, fast)}) | counted
    known["objective"] = objective or (DEFAULT_OBJECTIVE if target_rmse is None else "rmse")
    known["time_limit"] = _time_limit(noise_share, step_seconds, parameters, device)
    if steps is not None:
        _show_choices(steps, known, as_json)
        return
    run = Run.from_data(**known)
    with terminal.progress() as advance:
        if mechanism is not None:
            chosen = named_plan(run, mechanism, advance)
        else:
            chosen = make_plan(run, advance) if target_rmse is None else plan_for_rmse(run, target_rmse, advance)
        if save is not None:
            chosen.save(save)
        if plot is not None:
            advance(0, 1, f"drawing {plot.name}")
            chosen.draw(plot)
        if html is not None:
            advance(0, 1, f"writing {html.name}")
            chosen.write_page(html)
        advance(0, 1, "comparing with DP-SGD")
        answers = None if as_json else chosen.answers if explain else asked_about(chosen, thorough=False)
        found = None if table is None else user_limits(chosen, table[1], rows_per_user or 1, table[2])
    if answers is None:
        content = {**chosen.as_dict(), "meaning": chosen.meaning.as_dict()}
        terminal.print_json(content | ({} if found is None else {"user_limits": found.as_dict()}))
        return
    tables.print_plan(chosen, answers, terminal.console, explain)
    if found is not None:
        terminal.console.print(limits_table(found))
        for sentence in limit_sentences(found):
            terminal.say(sentence)
    if mechanism is not None and (other := words.other_designs(chosen.mechanism)) is not None:
        terminal.say(other)
    if given["delta"] is None:
        terminal.say(words.usual_delta(run))
    terminal.say_written([save, plot, html])
    if not run.user_level:
        for line in next_lines(save):
            terminal.say(line)


def _refuse_unused(steps: int | None, rest: options.Given) -> None:
    if steps is not None and (unused := [options.flag(name) for name, value in rest.items() if value is not None]):
        raise QuellError(
            f"--steps compares ways to spend that many steps, so it does not go with {', '.join(unused)}: leave them "
            "out, choose a way, then plan it with --batch-size and --epochs"
        )


def _show_choices(steps: int, known: dict[str, Any], as_json: bool) -> None:
    with terminal.progress() as advance:
        choices = choices_for_steps(steps, progress=advance, **known)
    if as_json:
        terminal.print_json([choice.as_dict() for choice in choices])
        return
    terminal.console.print(tables.choices_table(choices))
    terminal.say(words.best_choice(min(choices, key=lambda choice: choice.error)))


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
