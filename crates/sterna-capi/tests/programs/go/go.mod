module sterna.example/save-restore

go 1.19
