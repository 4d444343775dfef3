//! Loads libibverbs and librdmacm at run time, so that hosts without them can run the program.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

use super::abi::*;
use crate::rdma::error::RdmaError;

/// All functions of libibverbs and librdmacm that are used.
pub(crate) struct Library {
    pub(crate) verbs: Verbs,
    pub(crate) manager: Manager,
}

const VERBS: &str = "libibverbs.so.1";
const MANAGER: &str = "librdmacm.so.1";

impl Library {
    /// The libraries, loaded by the first call that finds them and never unloaded.
    pub(crate) fn get() -> Result<&'static Self, RdmaError> {
        static LIBRARY: OnceLock<Library> = OnceLock::new();
        if let Some(library) = LIBRARY.get() {
            return Ok(library);
        }
        let loaded = Self { verbs: Verbs::load(VERBS)?, manager: Manager::load(MANAGER)? };
        Ok(LIBRARY.get_or_init(|| loaded))
    }
}

impl std::fmt::Debug for Library {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Library")
    }
}

/// Declares a structure of C functions, and how to load it.
macro_rules! functions {
    ($(#[$doc:meta])* $name:ident { $($function:ident($($argument:ty),*) $(-> $result:ty)?;)* }) => {
        $(#[$doc])*
        pub(crate) struct $name {
            $(pub(crate) $function: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
        }

        impl $name {
            fn load(file: &str) -> Result<Self, RdmaError> {
                let library = open(file)?;
                Ok(Self {
                    // SAFETY: the headers declare a function of this name and type, and the library is never unloaded.
                    $($function: unsafe { *symbol(library, file, stringify!($function))? },)*
                })
            }
        }
    };
}

functions! {
    /// Functions of libibverbs. Posting, polling and notifications are in [`ibv_context_ops`].
    Verbs {
        ibv_get_device_list(*mut c_int) -> *mut *mut ibv_device;
        ibv_free_device_list(*mut *mut ibv_device);
        ibv_get_device_name(*mut ibv_device) -> *const c_char;
        ibv_open_device(*mut ibv_device) -> *mut ibv_context;
        ibv_close_device(*mut ibv_context) -> c_int;
        ibv_query_device(*mut ibv_context, *mut ibv_device_attr) -> c_int;
        ibv_query_port(*mut ibv_context, u8, *mut ibv_port_attr) -> c_int;
        ibv_alloc_pd(*mut ibv_context) -> *mut ibv_pd;
        ibv_dealloc_pd(*mut ibv_pd) -> c_int;
        ibv_reg_mr(*mut ibv_pd, *mut c_void, usize, c_int) -> *mut ibv_mr;
        ibv_dereg_mr(*mut ibv_mr) -> c_int;
        ibv_create_comp_channel(*mut ibv_context) -> *mut ibv_comp_channel;
        ibv_destroy_comp_channel(*mut ibv_comp_channel) -> c_int;
        ibv_create_cq(*mut ibv_context, c_int, *mut c_void, *mut ibv_comp_channel, c_int) -> *mut ibv_cq;
        ibv_destroy_cq(*mut ibv_cq) -> c_int;
        ibv_get_cq_event(*mut ibv_comp_channel, *mut *mut ibv_cq, *mut *mut c_void) -> c_int;
        ibv_ack_cq_events(*mut ibv_cq, c_uint);
        ibv_modify_qp(*mut ibv_qp, *mut ibv_qp_attr, c_int) -> c_int;
        ibv_get_async_event(*mut ibv_context, *mut ibv_async_event) -> c_int;
        ibv_ack_async_event(*mut ibv_async_event);
    }
}

functions! {
    /// Functions of librdmacm, the connection manager.
    Manager {
        rdma_create_event_channel() -> *mut rdma_event_channel;
        rdma_destroy_event_channel(*mut rdma_event_channel);
        rdma_get_cm_event(*mut rdma_event_channel, *mut *mut rdma_cm_event) -> c_int;
        rdma_ack_cm_event(*mut rdma_cm_event) -> c_int;
        rdma_create_id(*mut rdma_event_channel, *mut *mut rdma_cm_id, *mut c_void, c_uint) -> c_int;
        rdma_destroy_id(*mut rdma_cm_id) -> c_int;
        rdma_migrate_id(*mut rdma_cm_id, *mut rdma_event_channel) -> c_int;
        rdma_set_option(*mut rdma_cm_id, c_int, c_int, *mut c_void, usize) -> c_int;
        rdma_bind_addr(*mut rdma_cm_id, *mut libc::sockaddr) -> c_int;
        rdma_listen(*mut rdma_cm_id, c_int) -> c_int;
        rdma_resolve_addr(*mut rdma_cm_id, *mut libc::sockaddr, *mut libc::sockaddr, c_int) -> c_int;
        rdma_resolve_route(*mut rdma_cm_id, c_int) -> c_int;
        rdma_create_qp(*mut rdma_cm_id, *mut ibv_pd, *mut ibv_qp_init_attr) -> c_int;
        rdma_destroy_qp(*mut rdma_cm_id);
        rdma_connect(*mut rdma_cm_id, *mut rdma_conn_param) -> c_int;
        rdma_accept(*mut rdma_cm_id, *mut rdma_conn_param) -> c_int;
        rdma_reject(*mut rdma_cm_id, *const c_void, u8) -> c_int;
        rdma_disconnect(*mut rdma_cm_id) -> c_int;
        rdma_get_src_port(*mut rdma_cm_id) -> u16;
    }
}

/// Loads a library permanently: it is never unloaded.
fn open(file: &str) -> Result<&'static libloading::Library, RdmaError> {
    // SAFETY: both libraries are designed to be loaded at run time; their initialisers only fill their own tables.
    match unsafe { libloading::Library::new(file) } {
        Ok(library) => Ok(Box::leak(Box::new(library))),
        Err(error) => Err(RdmaError::NoLibrary { library: file.to_owned(), why: error.to_string() }),
    }
}

/// # Safety
/// If the library has a function of this name, it must have the type `T`.
unsafe fn symbol<T>(
    library: &'static libloading::Library,
    file: &str,
    name: &'static str,
) -> Result<libloading::Symbol<'static, T>, RdmaError> {
    // SAFETY: guaranteed by the caller.
    let symbol = unsafe { library.get::<T>(name) };
    symbol.map_err(|_| RdmaError::NoLibrary {
        library: file.to_owned(),
        why: format!("it has no function {name}: it is too old"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_library_is_named_with_the_packages() {
        let error = Verbs::load("libsterna-no-such.so.1").err().expect("there is no such library");

        let text = error.to_string();
        assert!(text.contains("libsterna-no-such.so.1") && text.contains("libibverbs1"), "{text}");
    }

    #[test]
    fn library_without_a_function_is_too_old() {
        let error = Verbs::load("libc.so.6").err().expect("libc has no verbs");

        let text = error.to_string();
        assert!(text.contains("libc.so.6") && text.contains("no function ibv_get_device_list"), "{text}");
    }
}
