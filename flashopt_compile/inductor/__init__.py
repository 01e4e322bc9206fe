"""Where steps become kernels: the only training code that touches torch._inductor and torch._dynamo."""
