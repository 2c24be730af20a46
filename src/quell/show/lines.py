"""Lines of Python that train with a plan, to be pasted."""

from __future__ import annotations

from pathlib import Path


def next_lines(saved: Path | None) -> list[str]:
    """How to train with a plan, to be pasted; `saved` is the plan's file, if there is one."""
    imports, load, *loop = python_lines(str(saved or "plan.json"))
    return [
        "Next: train it. docs/learning-rates.md says how to choose lr and max_grad_norm.",
        f"  {imports}",
        f"  {load}" + ("" if saved else "  # from quell plan ... --save plan.json"),
        *(f"  {line}" for line in loop),
        "With Hugging Face, in place of the loop:",
        "  from quell.torch.huggingface import PrivateTrainer",
        "  PrivateTrainer(model, args, train_dataset=data, plan=plan).train()",
    ]


def python_lines(saved: str, users: bool = False) -> list[str]:
    """Python that trains with a plan file, for a program that has a model, an optimizer, data and a criterion."""
    whose = " users=ids," if users else ""
    return [
        "import quell, quell.torch",
        f"plan = quell.Plan.load({saved!r})",
        "model, optimizer, loader = quell.torch.make_private(",
        f"    model, optimizer, data, plan,{whose} max_grad_norm=1.0, key='run.key')",
        "step = quell.torch.load_checkpoint('run.pt', model, optimizer, loader)",
        "while step < plan.steps:",
        "    for x, y in loader:",
        "        optimizer.zero_grad()",
        "        criterion(model(x), y).backward()",
        "        optimizer.step()",
        "        step += 1",
        "    quell.torch.save_checkpoint('run.pt', model, optimizer, loader)",
    ]
