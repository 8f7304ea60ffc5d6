"""Page of a lab, live: `qnnfarm serve`."""
