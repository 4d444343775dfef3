//! Checks whether a VM's guest can leave, and whether a VM waits for one.

use serde_json::Value;

use super::error::DriveError;
use super::progress::Progress;
use super::vm::Vm;

/// Refuses a VM whose guest cannot leave, before anything is changed on either side. `verb` names the intended action,
/// such as `migrate`. Returns the run state.
///
/// # Errors
/// [`DriveError::Unfit`] with the reason and what to do.
pub fn may_leave(vm: &mut Vm, verb: &str) -> Result<String, DriveError> {
    let unfit = |text: String| Err(DriveError::Unfit(text));
    let state = vm.run_state()?;
    if state == "inmigrate" {
        return unfit(format!("{} waits for a migration and has no guest to {verb}", vm.at()));
    }
    if state == "postmigrate" {
        return unfit(format!(
            "the guest of {} is stopped because it was migrated or saved before: to {verb} it again, first resume it \
             with `cont` there, if it runs nowhere else",
            vm.at()
        ));
    }
    let query = vm.execute("query-migrate", Value::Null)?;
    let progress = Progress::from_query(&query);
    if !progress.is_over() {
        return unfit(format!(
            "{} already migrates (`{}`): wait for its end or cancel it (`sterna cancel`)",
            vm.at(),
            progress.status
        ));
    }
    Ok(state)
}

/// Refuses a VM with a device or a setting that prevents migrations, as reported by its monitor.
///
/// # Errors
/// [`DriveError::Unfit`] with the monitor's reasons.
pub fn refuse_blocked(vm: &mut Vm) -> Result<(), DriveError> {
    let query = vm.execute("query-migrate", Value::Null)?;
    let reasons = query["blocked-reasons"].as_array().into_iter().flatten().filter_map(Value::as_str);
    let reasons: Vec<&str> = reasons.map(|reason| reason.trim_end_matches('.')).collect();
    if reasons.is_empty() {
        return Ok(());
    }
    Err(DriveError::Unfit(format!("{} cannot migrate its guest: {}", vm.at(), reasons.join("; "))))
}

/// Whether a VM without a guest listens for one, according to its answer to `query-migrate`.
///
/// A QEMU 7.2 that listens reports only the address, and no status.
pub fn listens(query: &Value) -> bool {
    match query["status"].as_str() {
        Some(status) if status != "none" => status == "setup",
        _ => query["socket-address"].as_array().is_some_and(|addresses| !addresses.is_empty()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn listens_is_told_by_the_status_or_by_an_address() {
        let address = json!([{"type": "inet", "host": "127.0.0.1", "port": "4444"}]);
        assert!(listens(&json!({"status": "setup"})));
        // QEMU 7.2 has no `status` while it listens.
        assert!(listens(&json!({"socket-address": address})));
        assert!(!listens(&json!({})));
        assert!(!listens(&json!({"socket-address": []})));
        assert!(!listens(&json!({"status": "failed", "socket-address": address})));
    }
}
