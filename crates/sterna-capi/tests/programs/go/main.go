// Saves a guest of plain memory to a mapped-ram file and restores it: save-restore FILE.
package main

/*
#include <stdlib.h>
#include "bridge.h"
*/
import "C"

import (
	"encoding/binary"
	"fmt"
	"os"
	"runtime/cgo"
	"sync/atomic"
	"unsafe"
)

const pages = 1024
const bytes = pages * 4096

// A guest without a vCPU: memory, and a device with a number.
type machine struct {
	memory []byte
	device uint32
	runs   int32
	vm     *C.sterna_vm
}

func of(handle C.uintptr_t) *machine {
	return cgo.Handle(handle).Value().(*machine)
}

//export goIsRunning
func goIsRunning(handle C.uintptr_t) C.bool {
	return atomic.LoadInt32(&of(handle).runs) != 0
}

//export goRun
func goRun(handle C.uintptr_t, on C.bool) {
	var runs int32
	if on {
		runs = 1
	}
	atomic.StoreInt32(&of(handle).runs, runs)
}

//export goSave
func goSave(handle C.uintptr_t) C.uint32_t {
	return C.uint32_t(of(handle).device)
}

//export goLoad
func goLoad(handle C.uintptr_t, body unsafe.Pointer, length C.size_t, failure *C.sterna_failure) C.int32_t {
	if length != 4 {
		text := C.CString("a number has four bytes")
		defer C.free(unsafe.Pointer(text))
		C.sterna_failure_set(failure, text)
		return -1
	}
	of(handle).device = binary.LittleEndian.Uint32(unsafe.Slice((*byte)(body), 4))
	return 0
}

// Ends the program with the error of a call that failed.
func check(code C.int32_t, failed *C.sterna_error) {
	if code != C.STERNA_OK {
		fmt.Fprintln(os.Stderr, C.GoString(C.sterna_error_message(failed)))
		os.Exit(1)
	}
}

func newMachine() *machine {
	memory := C.bridge_memory(bytes)
	if memory == nil {
		panic("no memory")
	}
	// The memory is not Go's, so its collector does not move it.
	m := &machine{memory: unsafe.Slice((*byte)(memory), bytes)}
	var failed *C.sterna_error
	m.vm = C.bridge_vm(C.uintptr_t(cgo.NewHandle(m)), memory, bytes, &failed)
	if m.vm == nil {
		check(C.sterna_error_code(failed), failed)
	}
	return m
}

func main() {
	address := C.CString("file:" + os.Args[1])
	mappedRam := C.CString("mapped-ram")
	var failed *C.sterna_error
	var parameters *C.sterna_parameters
	check(C.sterna_parameters_new(&parameters, &failed), failed)
	check(C.sterna_parameters_set_capability(parameters, mappedRam, true, &failed), failed)

	source, target := newMachine(), newMachine()
	for page := 0; page < pages; page++ {
		binary.LittleEndian.PutUint64(source.memory[page*4096:], uint64(page*3+1))
	}
	source.device, source.runs = 4711, 1

	var migration *C.sterna_migration
	check(C.sterna_migration_start(source.vm, address, parameters, nil, &migration, &failed), failed)
	check(C.sterna_migration_wait(migration, -1, &failed), failed)
	C.sterna_migration_free(migration)

	var incoming *C.sterna_incoming
	check(C.sterna_incoming_listen(target.vm, address, parameters, nil, &incoming, &failed), failed)
	check(C.sterna_incoming_wait(incoming, -1, nil, &failed), failed)
	C.sterna_incoming_free(incoming)

	for page := 0; page < pages; page++ {
		if got := binary.LittleEndian.Uint64(target.memory[page*4096:]); got != uint64(page*3+1) {
			fmt.Fprintln(os.Stderr, "page", page, "has", got)
			os.Exit(1)
		}
	}
	if atomic.LoadInt32(&target.runs) == 0 {
		panic("the restored guest does not run")
	}
	C.sterna_vm_free(source.vm)
	C.sterna_vm_free(target.vm)
	C.sterna_parameters_free(parameters)
	fmt.Printf("restored: device %d, %d pages\n", target.device, pages)
}
