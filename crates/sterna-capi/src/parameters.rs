//! Settings of a migration by QEMU's names.
//!
//! Names, ranges and conversions are the monitor's (`sterna-qmp`), so that this interface does not grow with each of
//! them.

use std::ffi::{c_char, c_void};
use std::path::PathBuf;
use std::sync::Arc;

use parking_lot::Mutex;
use serde_json::Map;
use sterna::{
    Authorization, Capabilities, OnThreadStart, Parameters, ThreadRole, Tls, TlsCredentials, TlsEndpoint,
};
use sterna_qmp::migration::{CAPABILITIES, CapabilitySet, ParameterSet, parameter};

use crate::boundary::{Done, borrow, enter, hand_out, quietly, text, writable};
use crate::callbacks::{Owned, inside, sterna_notice};
use crate::error::{
    Failure, STERNA_ERROR_CREDENTIALS, STERNA_ERROR_NAME, STERNA_ERROR_SETTINGS, sterna_error,
};
use crate::text::new_text;

/// The settings of a migration: QEMU's parameters and capabilities, and TLS. A migration copies them when it starts.
pub struct sterna_parameters {
    settings: Mutex<Settings>,
}

/// Makes settings with QEMU's defaults, but without a limit of the bandwidth.
///
/// Errors: STERNA_ERROR_NULL. Threads: any.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sterna_parameters_new(
    parameters: *mut *mut sterna_parameters,
    error: *mut *mut sterna_error,
) -> i32 {
    // SAFETY: the header has these contracts.
    unsafe {
        enter(error, || {
            writable(parameters, "parameters")?;
            hand_out(parameters, sterna_parameters { settings: Mutex::new(Settings::new()?) });
            Ok(())
        })
    }
}

/// Sets a parameter by its name in docs/qmp.md, such as "multifd-channels". The value is text: a number in the
/// parameter's unit, a size such as "64M", a word, or "on" and "off". A bandwidth without a suffix is in bytes
/// per second.
///
/// Both sides must agree on the parameters that docs/qmp.md marks.
///
/// Errors: STERNA_ERROR_NAME, STERNA_ERROR_SETTINGS for a value out of range. Then nothing has changed. Threads:
/// any.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sterna_parameters_set(
    parameters: *mut sterna_parameters,
    name: *const c_char,
    value: *const c_char,
    error: *mut *mut sterna_error,
) -> i32 {
    // SAFETY: the header has these contracts.
    unsafe {
        enter(error, || {
            let (name, value) = (text(name, "name")?, text(value, "value")?);
            borrow(parameters, "parameters")?.settings.lock().set(name, value, false)
        })
    }
}

/// The present value of a parameter as text, which the caller frees with sterna_string_free. NULL for an unknown
/// name.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sterna_parameters_get(
    parameters: *const sterna_parameters,
    name: *const c_char,
) -> *mut c_char {
    quietly(std::ptr::null_mut(), || {
        // SAFETY: the header has these contracts.
        let (parameters, name) = unsafe { (parameters.as_ref(), text(name, "name")) };
        let value =
            parameters.zip(name.ok()).and_then(|(parameters, name)| parameters.settings.lock().get(name));
        value.map_or(std::ptr::null_mut(), |value| new_text(&value).into_raw())
    })
}

/// Switches a capability on or off by its name in docs/qmp.md, such as "multifd" or "mapped-ram".
///
/// Errors: STERNA_ERROR_NAME, STERNA_ERROR_SETTINGS if it excludes another that is on, or needs one that is off. Then
/// nothing has changed. Threads: any.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sterna_parameters_set_capability(
    parameters: *mut sterna_parameters,
    name: *const c_char,
    on: bool,
    error: *mut *mut sterna_error,
) -> i32 {
    // SAFETY: the header has these contracts.
    unsafe {
        enter(error, || {
            let name = text(name, "name")?;
            borrow(parameters, "parameters")?.settings.lock().switch(name, on)
        })
    }
}

/// Makes every channel speak TLS with the certificates in `directory`: ca-cert.pem, and client-cert.pem and
/// client-key.pem at the source, server-cert.pem and server-key.pem at the destination (QEMU's names). The files
/// are read when the migration starts. Both sides verify each other. NULL switches TLS off.
///
/// The parameter "tls-hostname" sets the name that the destination's certificate must have. The default is the
/// host of the address.
///
/// Errors: STERNA_ERROR_NULL. Threads: any.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sterna_parameters_set_tls_directory(
    parameters: *mut sterna_parameters,
    directory: *const c_char,
    error: *mut *mut sterna_error,
) -> i32 {
    // SAFETY: the header has these contracts.
    unsafe {
        enter(error, || {
            let parameters = borrow(parameters, "parameters")?;
            let directory =
                if directory.is_null() { None } else { Some(text(directory, "directory")?.into()) };
            parameters.settings.lock().tls_directory = directory;
            Ok(())
        })
    }
}

/// Accepts only the client whose certificate has this distinguished name, such as "C=GB,O=Example,CN=host-a".
/// Destination only. NULL accepts every client with a valid certificate.
///
/// Errors: STERNA_ERROR_NULL. Threads: any.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sterna_parameters_set_tls_client(
    parameters: *mut sterna_parameters,
    name: *const c_char,
    error: *mut *mut sterna_error,
) -> i32 {
    // SAFETY: the header has these contracts.
    unsafe {
        enter(error, || {
            let parameters = borrow(parameters, "parameters")?;
            let name = if name.is_null() { None } else { Some(text(name, "name")?.to_owned()) };
            parameters.settings.lock().tls_client = name;
            Ok(())
        })
    }
}

/// Sets a function that each thread of a migration with these settings calls first, with the thread's role, such
/// as "lane": for seccomp filters, affinity, cgroups and signal masks. `destroy` is called when neither the
/// settings nor a migration need `user` any more; it may be NULL. A NULL `hook` removes the function.
///
/// Errors: STERNA_ERROR_NULL; `destroy` is not called then. Threads: any. The hook runs on each thread, several
/// at a time.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sterna_parameters_set_thread_hook(
    parameters: *mut sterna_parameters,
    hook: Option<unsafe extern "C" fn(user: *mut c_void, role: *const c_char)>,
    user: *mut c_void,
    destroy: sterna_notice,
    error: *mut *mut sterna_error,
) -> i32 {
    // SAFETY: the header has these contracts.
    unsafe {
        enter(error, || {
            let parameters = borrow(parameters, "parameters")?;
            let hook = hook.map(|hook| {
                let owned = Owned::new(user, destroy);
                Arc::new(move |role: ThreadRole| {
                    // The whole of it is captured: its pointer alone cannot be shared between threads.
                    let owned = &owned;
                    let role = new_text(&role.to_string());
                    // The program gave the function for this pointer, which `owned` keeps from being destroyed.
                    inside(|| hook(owned.pointer(), role.as_ptr()));
                }) as OnThreadStart
            });
            parameters.settings.lock().thread_hook = hook;
            Ok(())
        })
    }
}

/// Frees the settings. Migrations have copies. NULL is allowed.
///
/// Threads: any, once, and no other call with this handle runs.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn sterna_parameters_free(parameters: *mut sterna_parameters) {
    if !parameters.is_null() {
        // SAFETY: `sterna_parameters_new` has made the box, and the caller gives it back once.
        quietly((), || drop(unsafe { Box::from_raw(parameters) }));
    }
}

/// The settings behind one handle `sterna_parameters`.
#[derive(Clone)]
pub(crate) struct Settings {
    parameters: ParameterSet,
    capabilities: CapabilitySet,
    tls_directory: Option<PathBuf>,
    tls_client: Option<String>,
    thread_hook: Option<OnThreadStart>,
}

impl Settings {
    /// The settings of a handle; the defaults for NULL.
    ///
    /// # Safety
    /// `parameters` is null or a handle that was not freed.
    pub(crate) unsafe fn of(parameters: *const sterna_parameters) -> Done<Self> {
        // SAFETY: as the contract says.
        unsafe { parameters.as_ref() }
            .map_or_else(Self::new, |parameters| Ok(parameters.settings.lock().clone()))
    }

    fn new() -> Done<Self> {
        let (parameters, capabilities) = (ParameterSet::default(), CapabilitySet::default());
        let mut settings =
            Self { parameters, capabilities, tls_directory: None, tls_client: None, thread_hook: None };
        // QEMU's default is for its monitor. A library limits nothing that its user has not limited.
        settings.set("max-bandwidth", "0", false)?;
        Ok(settings)
    }

    /// Sets a parameter. `is_running` refuses those that a running migration does not follow.
    pub(crate) fn set(&mut self, name: &str, value: &str, is_running: bool) -> Done {
        let refuse = |text: String| Err(Failure::new(STERNA_ERROR_NAME, text));
        let Some(spec) = parameter(name) else {
            return refuse(format!("there is no parameter '{name}'; docs/qmp.md lists them"));
        };
        match name {
            "tls-creds" => {
                return refuse(
                    "tls-creds names an object of a monitor: call sterna_parameters_set_tls_directory".into(),
                );
            }
            "tls-authz" => {
                return refuse(
                    "tls-authz names an object of a monitor: call sterna_parameters_set_tls_client".into(),
                );
            }
            "tls-hostname" => {}
            _ if !spec.is_of_engine() => {
                return refuse(format!("the parameter '{name}' has no effect in this library: leave it out"));
            }
            _ => {}
        }
        let settings = |error: sterna_qmp::QmpError| Failure::new(STERNA_ERROR_SETTINGS, error.desc);
        let value = spec.parse(value, 1).map_err(settings)?;
        self.parameters.set(&Map::from_iter([(name.to_owned(), value)]), is_running).map_err(settings)
    }

    fn get(&self, name: &str) -> Option<String> {
        use serde_json::Value;
        Some(match self.parameters.get(name)? {
            Value::String(text) => text.clone(),
            Value::Bool(true) => "on".to_owned(),
            Value::Bool(false) => "off".to_owned(),
            other => other.to_string(),
        })
    }

    fn switch(&mut self, name: &str, on: bool) -> Done {
        if !CAPABILITIES.iter().any(|spec| spec.name == name) {
            let text = format!("there is no capability '{name}'; docs/qmp.md lists them");
            return Err(Failure::new(STERNA_ERROR_NAME, text));
        }
        if name == "x-colo" {
            let text = "the capability 'x-colo' has no effect in this library, which protects no guest: leave it out";
            return Err(Failure::new(STERNA_ERROR_NAME, text));
        }
        let change = [(name.to_owned(), on)];
        self.capabilities = self
            .capabilities
            .with(&change)
            .map_err(|error| Failure::new(STERNA_ERROR_SETTINGS, error.desc))?;
        Ok(())
    }

    /// In the engine's types, for a side that is this end of TLS.
    pub(crate) fn for_engine(&self, endpoint: TlsEndpoint) -> Done<(Parameters, Capabilities)> {
        let mut parameters = self.live();
        parameters.on_thread_start = self.thread_hook.clone();
        if let Some(directory) = &self.tls_directory {
            let credentials = TlsCredentials::from_directory(directory, endpoint, true)
                .map_err(|error| Failure::new(STERNA_ERROR_CREDENTIALS, error))?;
            let mut tls = Tls::new(Arc::new(credentials));
            tls.hostname = self.get("tls-hostname").filter(|name| !name.is_empty());
            let client = self.tls_client.as_deref().filter(|_| endpoint == TlsEndpoint::Server);
            tls.authorization = client.map(Authorization::only);
            parameters.tls = Some(tls);
        }
        Ok((parameters, self.capabilities.to_engine(true)))
    }

    /// The parameters without TLS.
    pub(crate) fn live(&self) -> Parameters {
        self.parameters.to_engine()
    }
}
