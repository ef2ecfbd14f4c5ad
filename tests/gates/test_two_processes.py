"""Gate: two processes train as one process does with their joint batch, also with batches of different sizes: the whole network,
quantizers included, in float64."""

import copy

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from gate_network import images, prepared_network, settings
from torch import nn

import qat

SPLITS = ((2, 6), (4, 4))
GRIDS = (("w8_per_channel", "minmax"), ("w4_per_tensor", "lsq"))
SETTINGS = [setting for setting in settings() if setting[1:] in GRIDS]


class WithLeftNorms(nn.Module):
    """BatchNorms that stay: at the input, behind an activation, and one without running statistics."""

    def __init__(self):
        super().__init__()
        self.first, self.conv, self.act, self.second = nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3), nn.ReLU(), nn.BatchNorm2d(4, momentum=None)
        self.last, self.none = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4, track_running_stats=False)

    def forward(self, x):
        return self.none(self.last(self.second(self.act(self.conv(self.first(x)))))).mean((2, 3))


def networks():
    for setting in SETTINGS:
        yield " ".join(setting), prepared_network(*setting, dtype=torch.float64)
    for strategy in ("bn_correction", "static"):
        torch.manual_seed(0)
        model = WithLeftNorms().double().train()
        config = qat.QATConfig(fold=strategy, activation_range="lsq")
        yield f"left norms {strategy}", qat.prepare(model, (images(dtype=torch.float64),), config)


def outcome(network, x, weights, ranks):
    """One training step's output, gradients, and state after it; gradients summed over ranks as the loss is."""
    x = x.clone().requires_grad_()
    network.zero_grad()
    y = network(x)
    (y * weights[:, : y.shape[1]]).sum().backward()
    gradients = torch.cat([p.grad.flatten() for p in network.parameters()])
    if ranks > 1:
        dist.all_reduce(gradients)
    return {"output": y.detach(), "gradient of x": x.grad, "gradients": gradients, **state_of(network)}


def state_of(network):
    return {name: value.detach().clone() for name, value in network.state_dict().items()}


def steps(networks, pick, ranks=1):
    """A step with each split, then a re-estimation; the learned ranges of the networks with left norms start in the first step."""
    weights = torch.linspace(-1, 1, 40, dtype=torch.float64).sin().view(8, 5)
    for name, network in networks:
        network = copy.deepcopy(network)
        for step, split in enumerate(SPLITS):
            x = images(20 + step, 8, torch.float64)
            yield f"{name} {split}", split, outcome(network, pick(x, split), pick(weights, split), ranks)
        qat.reestimate_bn(network, [pick(images(22 + k, 8, torch.float64), split) for k, split in enumerate(SPLITS)])
        yield f"{name} re-estimated", SPLITS[0], state_of(network)


def same(ours, wanted, where):
    torch.testing.assert_close(ours, wanted, rtol=1e-9, atol=1e-9, msg=lambda text: f"{where}: {text}")


def rank_main(rank, folder):
    torch.set_num_threads(1)
    networks = torch.load(f"{folder}/networks.pt", weights_only=False)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    found = steps(networks, lambda x, split: x.split(split)[rank], 2)
    torch.save([each for _, _, each in found], f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_two_ranks_are_one_with_the_joint_batch(tmp_path):
    made = list(networks())
    torch.save(made, tmp_path / "networks.pt")
    mp.spawn(rank_main, (str(tmp_path),), nprocs=2)
    ranks = [torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in range(2)]
    for (where, split, expected), *found in zip(steps(made, lambda x, split: x), *ranks, strict=True):
        for key, value in expected.items():
            for rank, ours in enumerate(found):
                wanted = value.split(split)[rank] if key in ("output", "gradient of x") else value
                same(ours[key], wanted, f"{where} {key} rank {rank}")
