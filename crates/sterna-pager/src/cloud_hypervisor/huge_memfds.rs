//! Whether the kernel makes huge pages of memfds by itself.
//!
//! A write to a memfd then makes up to 2 MiB present at once, and all bytes but the written ones read as zeros. A guest that
//! runs would see pages that were not placed.

use std::path::Path;

use super::error::SessionError;

const FOLDER: &str = "/sys/kernel/mm/transparent_hugepage";

/// Refuses a host on which memory cannot be placed page by page.
pub(super) fn check() -> Result<(), SessionError> {
    let whole = Path::new(FOLDER).join("shmem_enabled");
    let mut files = vec![whole];
    if let Ok(sizes) = std::fs::read_dir(FOLDER) {
        files.extend(sizes.flatten().map(|size| size.path().join("shmem_enabled")));
    }
    for file in files {
        // A kernel without such pages has no such file.
        let Ok(text) = std::fs::read_to_string(&file) else { continue };
        if let Some(setting) = unsafe_setting(&text) {
            let (file, setting) = (file.display().to_string(), setting.to_owned());
            return Err(SessionError::HugeShmem { file, setting });
        }
    }
    Ok(())
}

/// The setting, if it makes huge pages without a request.
fn unsafe_setting(text: &str) -> Option<&str> {
    let (_, rest) = text.split_once('[')?;
    let (setting, _) = rest.split_once(']')?;
    matches!(setting, "always" | "within_size" | "force").then_some(setting)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_that_make_huge_pages_without_a_request_are_named() {
        assert_eq!(unsafe_setting("always within_size advise [never] deny force\n"), None);
        assert_eq!(unsafe_setting("always inherit within_size [advise] never"), None);
        assert_eq!(unsafe_setting("[always] within_size advise never deny force\n"), Some("always"));
        assert_eq!(unsafe_setting("always [within_size] advise"), Some("within_size"));
        assert_eq!(unsafe_setting(""), None);
    }
}
