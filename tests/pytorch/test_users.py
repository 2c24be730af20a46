"""Privacy per user: who is in a batch, what one user can do to a run, and what is refused."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from quell import QuellError
from quell.adapters.users import owned_rows
from quell.noise import Key
from quell.planning import Plan, Prices
from quell.run import Run
from quell.schemes import SCHEMES, Batches
from quell.torch import attach, make_private
from quell.torch.loader import PlannedSampler

from ..user_streams import IDS, ROWS, goodness, keys, require_accounted, user_plan
from .training import clipped_gradient, examples, network, seeded, train, without_noise

CLIP = 0.3


def private(plan: Plan, data=None, users=IDS, **options):
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    return make_private(model, optimizer, data or examples(), plan, CLIP, users=users, **{"key": seeded(3), **options})


class Run0:
    """What a sampler asks of a run, with one key's batches: a thousand of these take a second."""

    def __init__(self, plan: Plan, numbers, most: int, key: Key, rank: int = 0, world: int = 1) -> None:
        scheme = plan.prices.scheme_of(plan.mechanism).for_training()
        self.plan, self.rank, self.world, self.step, self.epoch_end = plan, rank, world, 0, plan.steps
        self.batches = Batches(scheme, plan.run.examples, key.derive("quell batches"), "user")
        self.owned = owned_rows(numbers, plan, most, key)
        self.receive = self.restart_step = lambda *_: None
        self.planted = None


def drawn(plan, numbers, most, key, **ranks):
    return [list(portion) for portion in PlannedSampler(Run0(plan, numbers, most, key, **ranks), None)]


@pytest.mark.parametrize("count", [1000, pytest.param(20_000, marks=pytest.mark.slow)])
@pytest.mark.parametrize("sampling", SCHEMES)
def test_streams_of_rows_are_what_is_accounted(sampling, count):
    require_accounted(sampling, count, drawn)


def test_rows_come_in_turn():
    plan = user_plan(epochs=6)
    _, numbers = np.unique(IDS, return_inverse=True)
    seen: dict = {user: [] for user in range(10)}
    for rows in drawn(plan, numbers, 3, next(keys(1))):
        for block in np.array(rows).reshape(-1, 3):
            seen[numbers[block[0]]] += block.tolist()
    for user, rows in seen.items():
        times = Counter(rows)
        assert len(rows) == 18
        assert set(times) == set(np.flatnonzero(numbers == user))
        assert max(times.values()) - min(times.values()) <= 1


def test_ranks_share_a_batch_by_users():
    plan = user_plan()
    _, numbers = np.unique(IDS, return_inverse=True)
    whole = drawn(plan, numbers, 2, next(keys(1)))
    parts = [drawn(plan, numbers, 2, next(keys(1)), rank=rank, world=2) for rank in range(2)]
    for rows, *shares in zip(whole, *parts, strict=True):
        assert sorted(rows) == sorted(shares[0] + shares[1])
        assert not {numbers[row] for row in shares[0]} & {numbers[row] for row in shares[1]}


def test_other_users_rows_and_ids_change_nobodys_choice():
    """What a user brings is a function of the user's own rows: their number, and nothing else."""
    numbers = np.repeat(np.arange(4), [3, 4, 2, 5])
    plan = user_plan(users=4, batch_size=1)
    counts = []
    for other in (5, 50):
        owned = [owned_rows(np.repeat(np.arange(4), [3, 4, 2, other]), plan, 2, key) for key in keys(1000)]
        counts.append(Counter(tuple(each.taken(np.array([1]), 0)) for each in owned))
    pairs = [(a, b) for a in np.flatnonzero(numbers == 1) for b in np.flatnonzero(numbers == 1) if a != b]
    for found in counts:
        assert goodness(found, dict.fromkeys(pairs, 1 / 12)) > 1e-3


def gradients(data, users, most, plan=None, **options):
    """The sums before noise of every step, with the weights kept where they are."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    model, optimizer, loader = make_private(
        model,
        optimizer,
        data,
        without_noise(plan or user_plan()),
        CLIP,
        users=users,
        rows_per_user=most,
        key=seeded(3),
        **options,
    )
    found = []
    for _ in range(plan.epochs if plan else 2):
        for x, y in loader:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            whole = torch.cat([p.grad.flatten() for p in model.parameters()])
            found.append(whole.double() * optimizer.expected_batch_size)
    return torch.stack(found)


@pytest.mark.parametrize("most", [1, 3])
@pytest.mark.parametrize("sampling", ["cyclic", "poisson"])
def test_a_whole_user_moves_a_step_by_at_most_the_clip_norm(most, sampling):
    """All rows of one user are made extreme, then harmless: two clip norms at most, in the user's own steps only."""
    plan = user_plan(sampling)
    x, y = examples().tensors
    own = torch.as_tensor(IDS == "user 7")
    changed = [x.clone(), x.clone(), x.clone()]
    changed[0][own] *= 1e6
    changed[1][own] = -50.0
    changed[2][own] = float("nan")  # a gradient that is not finite counts as zero: the run without the user
    sums = [gradients(TensorDataset(each, y), IDS, most, plan) for each in changed]
    _, optimizer, _ = private(plan)
    steps = [7 in batch for batch in optimizer.run.batches]
    assert 0 < sum(steps) < len(steps)
    for each in sums[:2]:
        moved = (each - sums[2]).norm(dim=1)
        assert moved.max() <= CLIP * (1 + 1e-5)
        assert moved[torch.tensor(steps)].min() > 0.9 * CLIP  # it is there: rows this large use all of it
        assert moved[~torch.tensor(steps)].max() == 0


def test_a_users_rows_are_clipped_as_one():
    model, optimizer, loader = private(without_noise(user_plan()), rows_per_user=4)
    x, y = next(iter(loader))
    assert len(x) == 8
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()

    def unit_loss(outputs, labels):
        return nn.functional.cross_entropy(outputs.flatten(0, 1), labels.flatten())

    expected = clipped_gradient(network(), unit_loss, (x.view(2, 4, 6), y.view(2, 4)), CLIP)
    optimizer.step()
    for (name, p), right in zip(model.named_parameters(), expected.values(), strict=True):
        torch.testing.assert_close(p.grad * 2, right, rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize("options", [{"fixed_shape": True}, {"physical_batch_size": 1}, {"clipping": "microbatch"}])
def test_shapes_and_parts_change_nothing(options):
    plan = without_noise(user_plan("poisson"))
    most = 1 if "clipping" in options else 2
    weights = []
    for each in ({}, options):
        model, optimizer, loader = private(plan, rows_per_user=most, loss_reduction="sum", **each)
        train(model, optimizer, loader, criterion=lambda a, b: nn.functional.cross_entropy(a, b, reduction="sum"))
        weights.append([p.detach() for p in model.parameters()])
    torch.testing.assert_close(*weights, rtol=0, atol=1e-5)


def test_a_resumed_run_is_bitwise_the_same():
    plan = user_plan("b_min_sep")

    def started(users=IDS, most=2):
        return private(plan, users=users, rows_per_user=most)

    straight, first, again = started(), started(), started()
    train(*straight)
    train(*first, steps=3)
    saved = first[1].state_dict(), {name: value.clone() for name, value in first[0].state_dict().items()}
    train(*first)
    again[0].load_state_dict(saved[1])
    again[1].load_state_dict(saved[0])
    train(*again)
    for one, *others in zip(*(each[0].parameters() for each in (straight, first, again)), strict=True):
        assert torch.equal(one, others[0])
        assert torch.equal(one, others[1])
    swapped = IDS.copy()
    swapped[[0, 1]] = swapped[[1, 0]]
    assert swapped[0] != IDS[0]
    for wrong in ({"users": swapped}, {"most": 3}):
        with pytest.raises(QuellError, match=r"the state has (users|rows_per_user)"):
            started(**wrong)[1].load_state_dict(saved[0])


class Texts(Dataset):
    """Token ids of different lengths, whose owners the data set knows."""

    def __init__(self):
        random = np.random.default_rng(0)
        self.users = [int(number) for number in np.repeat(np.arange(10), ROWS)]
        self.texts = [torch.as_tensor(random.integers(1, 20, length)) for length in random.integers(1, 9, 40)]

    def __len__(self):
        return 40

    def __getitem__(self, index):
        return self.texts[index], index % 2


def padded(rows):
    texts, labels = zip(*rows, strict=True)
    return nn.utils.rnn.pad_sequence(list(texts), batch_first=True), torch.tensor(labels)


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.head = nn.Embedding(20, 4, padding_idx=0), nn.Linear(4, 2)

    def forward(self, tokens):
        return self.head(self.words(tokens).sum(1))


def test_rows_of_different_lengths_of_a_data_set_that_knows_its_users():
    model = Reader()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = DataLoader(Texts(), collate_fn=padded)
    model, optimizer, loader = make_private(
        model, optimizer, data, without_noise(user_plan()), CLIP, rows_per_user=3, key=seeded(3)
    )
    for tokens, labels in loader:
        assert len(tokens) == 6
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(tokens), labels).backward()
        optimizer.step()
    assert optimizer.run.step == 5


def test_the_report_says_user():
    _, optimizer, _ = private(user_plan("balls_in_bins"))
    report = optimizer.privacy_report()
    assert report.unit == "one user"
    assert report.sampling_assumption.startswith("Each user is put into one batch")
    assert "what one user adds to a step is clipped to norm 0.3; sums are divided by 2" in str(report)
    assert "example" not in str(report)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"users": None}, "nothing says whose the examples are: pass users= to make_private"),
        ({"users": IDS[:-1]}, "39 ids of users for 40 examples"),
        ({"users": np.where(IDS == "user 3", "user 4", IDS)}, "those of 9 users, but the plan is for 10: .*users=9"),
        ({"users": [*IDS[:-1], None]}, r"example 39 has no user \(None\)"),
        ({"users": torch.tensor([float("nan")] * 40)}, r"example 0 has no user"),
        ({"users": [*IDS[:-1], ("user 1", "user 2")]}, "example 39 has several users"),
        ({"users": [{}] * 40}, "cannot be an id"),
        ({"users": "user"}, "pass a list or an array"),
        ({"users": IDS[:, None]}, r"shape \(40, 1\)"),
        ({"rows_per_user": 0}, "rows_per_user=0"),
        ({"rows_per_user": 2, "clipping": "microbatch"}, "need clipping='layers'"),
    ],
)
def test_what_does_not_say_whose_rows_are_whose(change, message):
    with pytest.raises(QuellError, match=message):
        private(user_plan(), **change)


def test_users_and_examples_are_not_mixed_up(plan):
    for options in ({"users": IDS}, {"users": None, "rows_per_user": 2}):
        with pytest.raises(QuellError, match="this plan's are drawn of examples: make a plan with users="):
            private(plan, **options)
    params = dict(network().named_parameters())
    optimizer = torch.optim.SGD(params.values(), lr=0.1)
    with pytest.raises(QuellError, match="pass users= to make_private"):
        attach(optimizer, params, examples(), user_plan())


def test_runs_per_user_are_audited():
    plan = user_plan(users=20, batch_size=4)
    model, optimizer, loader = private(plan, users=np.arange(40) % 20, rows_per_user=2, canaries=16)
    train(model, optimizer, loader)
    assert not optimizer.audit().broken


def test_a_collate_function_that_sorts_rows_is_refused():
    """It would put rows of several users into one unit, and one user into several units."""

    def sorting(rows):
        return torch.utils.data.default_collate(sorted(rows, key=lambda row: float(row[0].sum())))

    given = torch.utils.data.DataLoader(Listed(examples()), collate_fn=sorting)
    model = network()
    options = {"users": IDS, "rows_per_user": 2, "key": seeded(3)}
    _, _, loader = make_private(model, torch.optim.SGD(model.parameters(), lr=0.1), given, user_plan(), CLIP, **options)
    for _ in range(5):  # however often the loop tries
        with pytest.raises(QuellError, match="changes the order of rows"):
            next(iter(loader))


class Listed(torch.utils.data.Dataset):
    """A data set that is asked for one example at a time."""

    def __init__(self, data):
        self.data = data

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return self.data[index]


@pytest.mark.slow
def test_trainers_take_users(tmp_path):
    """Both hand their options to make_private: the same weights as the plain loop's, bit by bit."""
    lightning = pytest.importorskip("tests.pytorch.test_lightning")
    whose = {"users": IDS, "rows_per_user": 2}
    callback = lightning.Private(user_plan(), examples(), CLIP, key=seeded(3), **whose)
    module = lightning.Module()
    lightning.trainer(tmp_path, callback).fit(module, callback.loader)
    model, optimizer, loader = private(user_plan(), rows_per_user=2)
    train(model, optimizer, loader)
    assert all(torch.equal(a, b) for a, b in zip(module.network.parameters(), model.parameters(), strict=True))
    huggingface = pytest.importorskip("tests.pytorch.test_huggingface")
    trainer = huggingface.trainer_of(huggingface.bert(), tmp_path, user_plan(), whose, {"max_steps": 3})
    assert trainer.train().global_step == 3
    assert trainer.privacy_report().unit == "one user"


PAIRS = [(f"p{number % 12}", f"p{number % 12 + 12}") for number in range(36)] + [("p0", "p1")] * 2 + ["p24", "p25"]


def test_a_user_of_shared_examples_moves_a_step_by_at_most_the_clip_norm():
    """All examples of p1, also those that others own too: 3 with p13, and 2 with p0 that are left out."""
    run = Run.from_data(groups=14, batch_size=2, epochs=2, epsilon=8.0, delta=1e-5, sampling="cyclic")
    plan = Plan(run, (Prices(run).price("bsr", bands=2),), 0)
    x, y = examples().tensors
    own = torch.tensor(["p1" in ([pair] if isinstance(pair, str) else pair) for pair in PAIRS])
    assert own.sum() == 5
    sums = []
    for change in (float("nan"), 1e6, -50.0):
        changed = x.clone()
        changed[own] *= change
        sums.append(gradients(TensorDataset(changed, y), PAIRS, 2, plan))
    for each in sums[1:]:
        moved = (each - sums[0]).norm(dim=1)
        assert moved.max() <= CLIP * (1 + 1e-5)
        assert (moved > 0).sum() == run.epochs  # once an epoch
    _, optimizer, loader = private(plan, users=PAIRS)
    assert optimizer.privacy_report().unit == "one user with public ownership of examples"
    left_out = {tuple(row.tolist()) for row in x[36:38]}
    for inputs, _ in loader:
        assert not left_out & {tuple(row.tolist()) for row in inputs}
        break
    with pytest.raises(QuellError, match="those of 14 groups, but the plan is for 12: make a plan with groups=14"):
        private(Plan(run.changed(groups=12), plan.mechanisms, 0), users=PAIRS)
