"""`qnnfarm nightly`: what changed is built, a plan is run and judged, and news is told."""
