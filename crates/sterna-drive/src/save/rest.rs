//! Lets a Sterna VM load the rest of its guest's memory before a save pauses the guest.

use std::time::Duration;

use serde_json::{Value, json};
use sterna_qmp::ClientError;

use crate::wait::loads_first;
use crate::{DriveError, Progress, Vm, Watch, Wish};

const COMPLETE: &str = "x-sterna-complete-memory";
/// Interval between two queries.
const LOOK: Duration = Duration::from_millis(20);

/// Waits until a guest that was restored before its memory was loaded has all of its memory. It runs meanwhile. Returns
/// whether there was anything to wait for.
///
/// If this program is killed, its connection closes, and the VM loads at its former rate again.
pub(super) fn load(vm: &mut Vm, watcher: &mut dyn Watch) -> Result<bool, DriveError> {
    if !vm.is_sterna() || !vm.schema()?.has(COMPLETE) {
        return Ok(false);
    }
    let mut is_told = false;
    loop {
        let answer = match vm.try_execute(COMPLETE, Value::Null) {
            Ok(answer) => answer,
            Err(ClientError::Refused { desc, .. }) => {
                let text = format!(
                    "{} was not saved: {desc}; the guest is unchanged, and there is no image",
                    vm.at()
                );
                return Err(DriveError::Failed(text));
            }
            Err(error) => return Err(vm.error(error)),
        };
        let missing_bytes = answer["missing-bytes"].as_u64().unwrap_or(0);
        if missing_bytes == 0 {
            return Ok(is_told);
        }
        if !std::mem::replace(&mut is_told, true) {
            watcher.note(&loads_first(vm, missing_bytes));
        }
        watcher.show(&Progress { status: "setup".to_owned(), missing_bytes, ..Progress::default() });
        match watcher.wish() {
            Wish::Continue | Wish::StartPostcopy => std::thread::sleep(LOOK),
            Wish::Cancel | Wish::Detach => {
                vm.execute(COMPLETE, json!({ "stop": true }))?;
                let text = "cancelled; the guest is unchanged, and there is no image";
                return Err(DriveError::Cancelled(text.to_owned()));
            }
        }
    }
}
