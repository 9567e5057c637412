"""A Triton backend for every machine, which compiles nothing. With TRITON_INTERPRET=1 kernels are interpreted.

vLLM runs its V2 model runner where Triton has an active backend. So tests have that runner without a GPU, slowly.
The tests' `process` makes a distribution of this folder: Triton and vLLM find its entry points in every process.
"""
