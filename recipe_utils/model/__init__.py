"""From a model's builder to its loaded weights on the device, cut into stages and wrapped as asked for."""
