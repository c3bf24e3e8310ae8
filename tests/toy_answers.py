"""A file of answers for training at toy size."""

import json
from pathlib import Path

import torch


def write_answers(path: Path, *, domain: str) -> Path:
    """Twelve answers of random bytes, as `prepare` writes them."""
    generator = torch.Generator().manual_seed(0)
    rows = [
        {
            "id": f"a{i}",
            "domain": domain,
            "temperature": 1.0,
            "top_p": 1.0,
            "prompt_token_ids": torch.randint(10, 250, (5,), generator=generator).tolist(),
            "token_ids": torch.randint(10, 250, (14,), generator=generator).tolist(),
            "finish_reason": "length",
            "text": "",
        }
        for i in range(12)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path
