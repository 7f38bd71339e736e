"""Where the environment with vLLM is."""
from pathlib import Path
ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".engines" / "vllm" / "bin" / "python"
