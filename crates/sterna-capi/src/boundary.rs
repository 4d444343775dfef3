//! What every entry of the library does: no panic leaves it, and pointers and texts are checked.

use std::ffi::{CStr, c_char};
use std::mem::MaybeUninit;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::error::{Failure, STERNA_ERROR_ARGUMENT, STERNA_ERROR_NULL, STERNA_OK, sterna_error};

/// The result of an entry's body.
pub(crate) type Done<T = ()> = Result<T, Failure>;

/// The version of this library, such as "0.1.0". The text is static.
///
/// Threads: any.
#[unsafe(no_mangle)]
pub extern "C" fn sterna_version() -> *const c_char {
    const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), "\0");
    VERSION.as_ptr().cast()
}

/// Runs the body of an entry. Stores its failure, or a panic, at `error` (NULL after success) and returns the code.
///
/// # Safety
/// `error` is null, or valid for a write of a pointer.
pub(crate) unsafe fn enter(error: *mut *mut sterna_error, body: impl FnOnce() -> Done) -> i32 {
    let done = catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|panic| Err(Failure::of_panic(&*panic)));
    let (code, stored) = match done {
        Ok(()) => (STERNA_OK, std::ptr::null_mut()),
        Err(failure) => (failure.code, Box::into_raw(Box::new(sterna_error::from(failure)))),
    };
    if error.is_null() {
        // SAFETY: null, or the box from above, which no one else knows.
        unsafe { crate::error::sterna_error_free(stored) };
    } else {
        // SAFETY: valid for a write, by the contract.
        unsafe { error.write(stored) };
    }
    code
}

/// Runs the body of an entry that reports no error: `fallback` if it panics.
pub(crate) fn quietly<T>(fallback: T, body: impl FnOnce() -> T) -> T {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or(fallback)
}

/// The object of a handle.
///
/// # Safety
/// `handle` is null, or points to a `T` that lives as long as `'a`.
pub(crate) unsafe fn borrow<'a, T>(handle: *const T, name: &str) -> Done<&'a T> {
    // SAFETY: as the contract says.
    unsafe { handle.as_ref() }.ok_or_else(|| is_null(name))
}

/// Stores a new object at `out`; the caller of the library owns it from now on.
///
/// # Safety
/// `out` is valid for a write of a pointer.
pub(crate) unsafe fn hand_out<T>(out: *mut *mut T, object: T) {
    // SAFETY: as the contract says.
    unsafe { out.write(Box::into_raw(Box::new(object))) }
}

/// Refuses a null pointer where a result is stored.
pub(crate) fn writable<T>(out: *mut T, name: &str) -> Done {
    if out.is_null() { Err(is_null(name)) } else { Ok(()) }
}

/// A text of the caller.
///
/// # Safety
/// `text` is null, or a text that ends in NUL and lives as long as `'a`.
pub(crate) unsafe fn text<'a>(text: *const c_char, name: &str) -> Done<&'a str> {
    if text.is_null() {
        return Err(is_null(name));
    }
    // SAFETY: not null, so it is a text by the contract.
    let bytes = unsafe { CStr::from_ptr(text) };
    bytes
        .to_str()
        .map_err(|error| Failure::new(STERNA_ERROR_ARGUMENT, format!("{name} is not UTF-8: {error}")))
}

/// A structure of C whose first member is its size, `size_t size`. Later versions append members.
///
/// # Safety
/// `repr(C)`, the first member is a `usize`, and any member may be zero.
pub(crate) unsafe trait Versioned: Copy {
    /// Its name in C.
    const NAME: &str;
    /// Its size in version 0.1.
    const LEAST_BYTES: usize;
}

/// Reads a structure that a program may have compiled with an older or newer header. Members that an older
/// header lacks are zero. Members that only a newer one has must be zero, because this library would ignore
/// them.
///
/// # Safety `given` is null, or points to as many bytes as its `size` says.
pub(crate) unsafe fn read<T: Versioned>(given: *const T) -> Done<T> {
    if given.is_null() {
        return Err(is_null(T::NAME));
    }
    // SAFETY: the first member is the size.
    let size = unsafe { given.cast::<usize>().read_unaligned() };
    if size < T::LEAST_BYTES || size > 1 << 16 {
        let text = format!("{}.size is {size}: set it to sizeof({})", T::NAME, T::NAME);
        return Err(Failure::new(STERNA_ERROR_ARGUMENT, text));
    }
    let mut own = MaybeUninit::<T>::zeroed();
    let known = size.min(size_of::<T>());
    // SAFETY: `size` bytes can be read, and the own structure has room for `known`.
    unsafe { std::ptr::copy_nonoverlapping(given.cast::<u8>(), own.as_mut_ptr().cast(), known) };
    // SAFETY: the rest of the `size` bytes.
    let rest = unsafe { std::slice::from_raw_parts(given.cast::<u8>().add(known), size - known) };
    if rest.iter().any(|byte| *byte != 0) {
        let text = format!("{} has members that this library does not know: use a newer libsterna", T::NAME);
        return Err(Failure::new(STERNA_ERROR_ARGUMENT, text));
    }
    // SAFETY: every member was copied or is zero, which is valid by the trait's contract.
    Ok(unsafe { own.assume_init() })
}

pub(crate) fn is_null(name: &str) -> Failure {
    Failure::new(STERNA_ERROR_NULL, format!("{name} is NULL"))
}

#[cfg(test)]
mod tests {
    use std::ffi::CStr;
    use std::ptr::null_mut;

    use super::*;
    use crate::error::{STERNA_ERROR_INTERNAL, sterna_error_free, sterna_error_message};

    #[test]
    fn panic_ends_at_the_boundary_as_an_error_with_its_text() {
        let mut error = null_mut();

        // SAFETY: valid for a write.
        let code = unsafe { enter(&raw mut error, || panic!("the {}", "text")) };

        assert_eq!(code, STERNA_ERROR_INTERNAL);
        // SAFETY: the error from above, which is freed once.
        unsafe {
            let text = CStr::from_ptr(sterna_error_message(error)).to_str().expect("UTF-8");
            assert_eq!(text, "internal error, please report it: the text");
            sterna_error_free(error);
            assert_eq!(enter(null_mut(), || panic!("again")), STERNA_ERROR_INTERNAL);
        }
        assert_eq!(quietly(3, || panic!("and again")), 3);
    }
}
