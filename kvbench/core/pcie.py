"""PCIe wire rates: what a link of so many lanes at so many GT/s carries in one direction."""

_FLIT_FROM_GT = 64.0
_BLOCK_CODE_FROM_GT = 8.0

GENERATIONS = {2.5: 1, 5.0: 2, 8.0: 3, 16.0: 4, 32.0: 5, 64.0: 6, 128.0: 7}


def pcie_bytes_per_s(lane_gt_per_s: float, width: int) -> float:
    """Bytes per second and direction: lanes · GT/s · code rate / 8.

    The code is 8b/10b up to 5 GT/s, 128b/130b from 8 GT/s and 242/256 (FLIT mode) from 64 GT/s, after the PCI Express
    base specifications. Packet headers are left out: they cost a few per cent more.
    """
    if lane_gt_per_s >= _FLIT_FROM_GT:
        code = 242 / 256
    elif lane_gt_per_s >= _BLOCK_CODE_FROM_GT:
        code = 128 / 130
    else:
        code = 8 / 10
    return lane_gt_per_s * 1e9 * code / 8 * width


def generation(lane_gt_per_s: float) -> int | None:
    """The PCIe generation of a lane rate; None for a rate that no generation has."""
    return GENERATIONS.get(lane_gt_per_s)
