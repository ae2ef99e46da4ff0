import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from softline.data.sampler import EvalShard, TrainBatches

Batch = list[tuple[int, int]]

splits = st.tuples(st.integers(1, 4), st.integers(1, 3))
runs = st.fixed_dictionaries(
    {"share": st.integers(1, 3), "spare": st.integers(0, 20), "seed": st.integers(0, 5), "steps": st.integers(0, 9)}
)


def global_batches(length: int, batch_size: int, seed: int, steps: int, processes: int, accumulate: int) -> list[Batch]:
    """The batch of each step, put together from every process's micro-batches."""
    ranks = [
        list(
            TrainBatches(
                length,
                batch_size=batch_size,
                seed=seed,
                start_step=0,
                total_steps=steps,
                rank=rank,
                processes=processes,
                accumulate=accumulate,
            )
        )
        for rank in range(processes)
    ]
    assert all(len(batches) == steps * accumulate for batches in ranks)
    micro = [key for turn in zip(*ranks, strict=True) for batch in turn for key in batch]
    return [micro[step * batch_size : (step + 1) * batch_size] for step in range(steps)]


@settings(max_examples=60, deadline=None)
@given(split=splits, run=runs)
def test_batches_do_not_depend_on_processes_and_accumulation(split, run):
    processes, accumulate = split
    batch_size = processes * accumulate * run["share"]
    length = batch_size + run["spare"]
    alone = global_batches(length, batch_size, run["seed"], run["steps"], 1, 1)
    assert global_batches(length, batch_size, run["seed"], run["steps"], processes, accumulate) == alone


@settings(max_examples=60, deadline=None)
@given(run=runs, batch_size=st.integers(1, 8))
def test_an_epoch_uses_no_image_twice_and_leaves_out_less_than_a_batch(run, batch_size):
    length = batch_size + run["spare"]
    steps = length // batch_size
    batches = global_batches(length, batch_size, run["seed"], 2 * steps, 1, 1)
    for epoch in range(2):
        keys = [key for batch in batches[epoch * steps : (epoch + 1) * steps] for key in batch]
        assert {key[0] for key in keys} == {epoch}
        assert len(set(keys)) == len(keys) > length - batch_size
        assert all(0 <= index < length for _, index in keys)


@settings(max_examples=60, deadline=None)
@given(split=splits, run=runs, data=st.data())
def test_a_resumed_run_goes_on_where_it_stopped(split, run, data):
    processes, accumulate = split
    start = data.draw(st.integers(0, run["steps"]))
    options = {
        "batch_size": processes * accumulate * run["share"],
        "seed": run["seed"],
        "total_steps": run["steps"],
        "rank": processes - 1,
        "processes": processes,
        "accumulate": accumulate,
    }
    length = options["batch_size"] + run["spare"]
    whole = TrainBatches(length, start_step=0, **options)
    tail = TrainBatches(length, start_step=start, **options)
    assert list(tail) == list(whole)[start * accumulate :]
    assert len(tail) == len(list(tail))


def test_epochs_and_seeds_have_orders_of_their_own():
    def order(seed: int, epoch: int) -> list[int]:
        batches = TrainBatches(50, batch_size=50, seed=seed, start_step=epoch, total_steps=epoch + 1)
        return [index for _, index in next(iter(batches))]

    orders = [order(seed, epoch) for seed in (0, 1) for epoch in (0, 1)]
    assert all(sorted(one) == list(range(50)) for one in orders)
    assert len({tuple(one) for one in orders}) == 4


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch_size": 64}, r"batch_size \(64\) is larger than the number of training images \(32\)"),
        ({"processes": 3}, r"batch_size \(16\) must be divisible by processes \(3\) \* accumulate \(1\)"),
        ({"accumulate": 5}, r"batch_size \(16\) must be divisible by processes \(1\) \* accumulate \(5\)"),
        ({"rank": 1}, r"rank \(1\) must be less than processes \(1\)"),
        ({"seed": -1}, "seed must be at least 0, got -1"),
        ({"start_step": 5}, "total_steps must be at least 5, got 4"),
        ({"batch_size": 8.0}, "batch_size must be a whole number, got 8.0"),
    ],
)
def test_impossible_batches_are_refused(change, message):
    options = {"batch_size": 16, "seed": 0, "start_step": 0, "total_steps": 4}
    with pytest.raises(ValueError, match=message):
        TrainBatches(32, **(options | change))


@given(length=st.integers(1, 40), processes=st.integers(1, 9))
def test_evaluation_counts_every_image_once(length, processes):
    shards = [EvalShard(length, rank=rank, processes=processes) for rank in range(processes)]
    read = [list(shard) for shard in shards]
    assert {len(indices) for indices in read} == {len(shards[0])} == {-(-length // processes)}
    assert all(0 <= index < length for indices in read for index in indices)
    counted = [index for shard, indices in zip(shards, read, strict=True) for index in indices[: shard.valid]]
    assert sorted(counted) == list(range(length))


def test_a_process_without_images_still_takes_part():
    shard = EvalShard(2, rank=3, processes=4)
    assert (shard.valid, list(shard)) == (0, [1])


def batches_of(groups, **options):
    sampler = TrainBatches(len(groups), batch_size=4, start_step=0, groups=groups, **{"seed": 3, **options})
    return sampler, [[index for _, index in batch] for batch in sampler]


def test_the_images_of_a_batch_are_of_one_group_and_whole_batches_are_all_used():
    groups = [0] * 11 + [1] * 6 + [2] * 3
    sampler, batches = batches_of(groups, total_steps=9)
    assert sampler.steps_per_epoch == 2 + 1
    assert all(len({groups[index] for index in batch}) == 1 for batch in batches)
    for epoch in range(3):
        seen = [index for batch in batches[3 * epoch : 3 * epoch + 3] for index in batch]
        assert len(set(seen)) == len(seen) == 12


def test_groups_take_turns_at_random_and_alike_for_every_number_of_processes():
    groups = [0, 1] * 40
    _, batches = batches_of(groups, total_steps=20)
    kinds = [groups[batch[0]] for batch in batches]
    assert sorted(kinds) == [0] * 10 + [1] * 10
    assert kinds not in ([0] * 10 + [1] * 10, [1] * 10 + [0] * 10)
    halves = [batches_of(groups, total_steps=20, rank=rank, processes=2)[1] for rank in range(2)]
    assert [first + second for first, second in zip(*halves, strict=True)] == batches
    later = batches_of(groups, total_steps=20)[0]
    later.start_step = 13
    assert [[index for _, index in batch] for batch in later] == batches[13:]


def test_groups_without_a_whole_batch_are_refused():
    with pytest.raises(ValueError, match=r"batch_size \(4\) is larger than each group of training images \(\[3, 2\]\)"):
        batches_of([0, 0, 0, 1, 1], total_steps=1)
    with pytest.raises(ValueError, match="one number for each of 3 images, got 2"):
        TrainBatches(3, batch_size=1, seed=0, start_step=0, total_steps=1, groups=[0, 0])
