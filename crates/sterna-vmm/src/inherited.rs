//! Descriptors that this program was started with.
//!
//! A number on the command line says nothing of who owns the descriptor by now: any part of the program, or a C library,
//! may have opened one of that number. So the numbers that are open and pass an exec are written down before `main`, when
//! nothing of the program has run yet. Each can be claimed once.

use std::ffi::CStr;
use std::io;

use parking_lot::{Mutex, MutexGuard};
use sterna::Address;

/// Those that nobody has claimed.
static LEFT: Mutex<Vec<i32>> = Mutex::new(Vec::new());

// SAFETY: the section holds addresses of functions that the C library's start calls before `main`, and this is one of
// that signature. It does not unwind, and uses nothing of Rust's library that `main` would have to prepare.
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
        // SAFETY: the directory was just opened, and nobody else reads it.
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
    // SAFETY: opened above, and used no more.
    unsafe { libc::closedir(directory) };
}

/// Takes over the descriptor that an address of the command line names by its number (`fd:7`), if it does; gives any
/// other address back as it is. From then on it is closed when what uses it ends.
///
/// # Errors
/// This program was not started with it, or it was taken over before.
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
    // SAFETY: it was open before anything of this program ran, so no part of the program has opened it, and whoever
    // started the program gave it away. It has just left the list, so nobody else is given it.
    unsafe { address.claim_inherited() }.map_err(io::Error::other)
}
