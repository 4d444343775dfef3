//! Memory of the host that fails under a machine.

use std::io;

use sterna_ram::guard;
use vmm_sys_util::signal::register_signal_handler;

/// From now on a page of guest RAM that fails under a copy or a scan of the engine's ends that access with an error,
/// and the migration with it; the guest runs on. Installs this process's handler of SIGBUS: a VMM that has one
/// calls [`guard::handle_sigbus`] there instead.
///
/// A page that fails under the guest itself ends the process, as it did without a handler: KVM says so with SIGBUS on
/// the vCPU's thread, and this machine has no machine-check exception to give to its guest.
///
/// # Errors
/// The system's.
pub fn forward_sigbus() -> io::Result<()> {
    register_signal_handler(libc::SIGBUS, on_sigbus)
        .map_err(|error| io::Error::from_raw_os_error(error.errno()))
}

extern "C" fn on_sigbus(signal: libc::c_int, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: these are the arguments that the kernel gave to this handler, which is running.
    if unsafe { guard::handle_sigbus(info, context) } {
        return;
    }
    // SAFETY: the structure is filled, by SA_SIGINFO.
    let code = unsafe { (*info).si_code };
    if code == libc::BUS_MCEERR_AO {
        // Nobody is using the failed page now; whoever touches it later gets the error.
        return;
    }
    // SAFETY: both calls may be made in a handler. Whoever touched the memory does so again and ends the process.
    unsafe {
        libc::signal(signal, libc::SIG_DFL);
        if code <= 0 {
            // Sent by somebody: it comes again when this handler returns.
            libc::raise(signal);
        }
    }
}
