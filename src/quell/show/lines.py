"""Lines of Python that train with a plan, to be pasted."""

from __future__ import annotations

from pathlib import Path


def next_lines(saved: Path | None) -> list[str]:
    """How to train with a plan, to be pasted; `saved` is the plan's file, if there is one."""
    load, *lines = python_lines(str(saved or "plan.json"))
    return [
        "Next: train it. docs/learning-rates.md says how to choose lr and max_grad_norm.",
        f"  {load}" + ("" if saved else "  # from quell plan ... --save plan.json"),
        *(f"  {line}" for line in lines),
        "With Hugging Face:",
        "  quell.torch.huggingface.PrivateTrainer(model, args, plan=plan, ...)",
    ]


def python_lines(saved: str, users: bool = False) -> list[str]:
    """Python that trains with a plan file, for a program that has imported quell."""
    whose = " users=ids," if users else ""
    return [
        f"plan = quell.Plan.load({saved!r})",
        "model, optimizer, loader = quell.torch.make_private(",
        f"    model, optimizer, data, plan,{whose} max_grad_norm=1.0, key='run.key')",
        "step = quell.torch.load_checkpoint('run.pt', model, optimizer, loader)",
    ]
