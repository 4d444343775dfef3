/* What cgo cannot express: pointers to functions, and a structure that is filled with them. */
#include "sterna.h"

/* A VM whose callbacks are Go's, with `handle` as their pointer. */
sterna_vm *bridge_vm(uintptr_t handle, void *memory, uint64_t length, sterna_error **error);
void *bridge_memory(uint64_t length);
