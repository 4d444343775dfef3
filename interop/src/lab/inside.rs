//! The lab from inside: this program as the VM's init.
#![allow(clippy::print_stdout)]

use std::ffi::CString;
use std::os::fd::AsRawFd;
use std::time::Instant;

use super::DONE;
use crate::scenarios::ALL;

/// Loads KVM, runs every scenario, says how it went, and switches the VM off.
pub fn run_as_init() -> ! {
    mount("devtmpfs", "/dev");
    mount("proc", "/proc");
    mount("sysfs", "/sys");
    load_modules();
    let mut failures = 0;
    for scenario in ALL {
        let begin = Instant::now();
        // A panic must not end init: the kernel would follow.
        let result = std::panic::catch_unwind(scenario.run).unwrap_or_else(|_| Err("it panicked".into()));
        let verdict = match result {
            Ok(()) => "ok".to_owned(),
            Err(why) => {
                failures += 1;
                format!("FAILED: {why}")
            }
        };
        println!("LAB {} ... {verdict} ({:?})", scenario.name, begin.elapsed());
    }
    println!("{DONE} {failures}");
    // SAFETY: a system call without pointers; nothing is mounted that must be synced.
    unsafe { libc::reboot(libc::RB_AUTOBOOT) };
    loop {
        std::thread::park();
    }
}

fn mount(kind: &str, at: &str) {
    let (Ok(kind), Ok(at)) = (CString::new(kind), CString::new(at)) else { return };
    // SAFETY: all pointers are to NUL-terminated strings that outlive the call; no data is passed.
    let result = unsafe { libc::mount(kind.as_ptr(), at.as_ptr(), kind.as_ptr(), 0, std::ptr::null()) };
    if result != 0 {
        println!("LAB mount {at:?}: {}", std::io::Error::last_os_error());
    }
}

fn load_modules() {
    let mut modules: Vec<_> =
        std::fs::read_dir("/m").into_iter().flatten().flatten().map(|entry| entry.path()).collect();
    modules.sort();
    for path in modules {
        let Ok(file) = std::fs::File::open(&path) else { continue };
        // SAFETY: the descriptor is open, the parameters an empty NUL-terminated string.
        let result = unsafe { libc::syscall(libc::SYS_finit_module, file.as_raw_fd(), c"".as_ptr(), 0) };
        if result != 0 {
            println!("LAB module {}: {}", path.display(), std::io::Error::last_os_error());
        }
    }
}
