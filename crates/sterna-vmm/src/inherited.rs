//! Descriptors that this program inherited from the process that started it.
//!
//! A descriptor number on the command line does not prove who opened that descriptor. Any part of the
//! program, or a C library, may have opened one with the same number. Therefore the numbers of open
//! descriptors without close-on-exec are recorded before `main`, when no code of the program has run. Each
//! can be claimed once.

use std::ffi::CStr;
use std::io;

use parking_lot::{Mutex, MutexGuard};
use sterna::Address;

/// Recorded descriptors that were not claimed yet.
static LEFT: Mutex<Vec<i32>> = Mutex::new(Vec::new());

// SAFETY: the section holds addresses of functions that the C library's start code calls before `main`, and
// `note` has their signature. It does not unwind. It uses no part of Rust's library that `main` would have to
// prepare.
#[used]
#[unsafe(link_section = ".init_array")]
static BEFORE_MAIN: extern "C" fn() = note;

fn left() -> MutexGuard<'static, Vec<i32>> {
    LEFT.lock()
}

extern "C" fn note() {
    // SAFETY: the path ends in a zero byte.
    let directory = unsafe { libc::opendir(c"/proc/self/fd".as_ptr()) };
    if directory.is_null() {
        return;
    }
    let mut left = left();
    loop {
        // SAFETY: the directory was just opened, and no other code reads it.
        let entry = unsafe { libc::readdir(directory) };
        if entry.is_null() {
            break;
        }
        // SAFETY: an entry is valid until the next one is read, and its name ends in a zero byte.
        let name = unsafe { CStr::from_ptr((*entry).d_name.as_ptr()) };
        let Some(number) = name.to_str().ok().and_then(|name| name.parse().ok()) else { continue };
        // SAFETY: no pointers are passed. The directory's own descriptor is close-on-exec.
        let flags = unsafe { libc::fcntl(number, libc::F_GETFD) };
        if number > 2 && flags >= 0 && flags & libc::FD_CLOEXEC == 0 {
            left.push(number);
        }
    }
    // SAFETY: the directory was opened above and is not used afterwards.
    unsafe { libc::closedir(directory) };
}

/// Takes over the descriptor that a command-line address names by number (`fd:7`). Any other address is
/// returned unchanged. A claimed descriptor is closed when its user closes it.
///
/// # Errors
/// The program was not started with the descriptor, or it was claimed before.
pub fn claim_inherited(address: Address) -> io::Result<Address> {
    let Address::Fd(name) = &address else { return Ok(address) };
    let number: Option<i32> = name.parse().ok();
    let mut left = left();
    let Some(at) = left.iter().position(|open| Some(*open) == number) else {
        let why =
            format!("{address}: this program was not started with that descriptor, or it was claimed before");
        return Err(io::Error::new(io::ErrorKind::InvalidInput, why));
    };
    left.swap_remove(at);
    drop(left);
    // SAFETY: the descriptor was open before any code of this program ran, so no part of the program opened
    // it. The process that started the program gave it away. It was just removed from the list, so no other
    // caller gets it.
    unsafe { address.claim_inherited() }.map_err(io::Error::other)
}
