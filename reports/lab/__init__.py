"""Page of a lab, live: `qnnfarm serve`. The extra `lab` has what it needs."""
