"""What a training keeps in host memory instead of the GPU's: saved activations, frozen weights, the optimizer."""
