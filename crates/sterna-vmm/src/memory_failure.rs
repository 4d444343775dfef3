//! Handling of host memory errors (SIGBUS) in guest RAM.

use std::io;

use sterna_ram::guard;
use vmm_sys_util::signal::register_signal_handler;

/// Installs a SIGBUS handler that turns memory errors during engine accesses into migration errors. If a page
/// of guest RAM fails while the engine copies or scans it, that access fails. The migration fails with it,
/// and the guest continues to run. A VMM with its own SIGBUS handler calls [`guard::handle_sigbus`] there
/// instead.
///
/// A page that fails under the guest itself ends the process, as without a handler. KVM reports it with
/// SIGBUS on the vCPU's thread, and this machine has no machine-check exception to inject into its guest.
///
/// # Errors
/// The system's error, if it refuses the handler.
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
        // No thread is using the failed page now. A later access to it gets the error.
        return;
    }
    // SAFETY: both calls are permitted in a handler. The thread that touched the memory repeats its access,
    // which ends the process.
    unsafe {
        libc::signal(signal, libc::SIG_DFL);
        if code <= 0 {
            // A process sent the signal. The raised signal is delivered when this handler returns.
            libc::raise(signal);
        }
    }
}
