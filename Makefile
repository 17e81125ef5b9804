# Every target is a script of the same name; read those.
.PHONY: setup demo test bench check soak fmt screenshots lock sbom

setup demo test bench check soak fmt screenshots lock sbom:
	@scripts/$@
