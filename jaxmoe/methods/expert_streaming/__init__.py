"""expert_streaming: experts that stream through dies in micro-slices (FSE-DP), and experts that dies load whole."""
