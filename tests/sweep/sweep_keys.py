"""Keys that most studies of these tests sweep."""

LINK, DIE, CHUNK = (
    "hardware.link.bandwidth_GB_per_s",
    "hardware.die.compute_TFLOPs_per_s",
    "hardware.router.chunk_B",
)
