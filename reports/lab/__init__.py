"""Page of a lab, live: `qnnfarm serve`. It needs the extra `lab`."""
