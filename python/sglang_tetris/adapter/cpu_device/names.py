"""Names by which SGLang and users know this device's parts."""

ATTENTION_BACKEND = "tetris_cpu"
