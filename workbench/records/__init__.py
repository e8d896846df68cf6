"""Records of runs on disk: run directories, step logs, certificates, recorded trainers; finding and checking them."""
