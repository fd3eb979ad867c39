"""Steps of a whole model as it is deployed on GPUs: kernels, memory, and what its users wait for."""
