"""`qnnfarm nightly`: builds changed containers, runs and judges a plan, and sends news."""
