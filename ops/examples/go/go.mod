module example.org/generate

go 1.22
