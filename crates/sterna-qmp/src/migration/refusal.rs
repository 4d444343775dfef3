//! Translates the engine's texts about settings to QEMU's names: refusals to start, and advice of a forecast.

use sterna::forecast::Advice;
use sterna::{SettingsError, StartError, TlsEndpoint};

use crate::error::QmpError;

/// The text for an operator, with QEMU's names of the settings.
pub fn sentence(why: &StartError) -> String {
    match why {
        StartError::Settings(error) => of_settings(error),
        other => other.to_string(),
    }
}

/// The text as a command's refusal.
pub(super) fn refused(why: StartError) -> QmpError {
    QmpError::generic(sentence(&why))
}

/// A forecast's advice for an operator.
pub fn advice(advice: &Advice) -> String {
    match advice {
        Advice::RaiseDowntimeLimit { milliseconds } => format!("raise downtime-limit to {milliseconds} ms"),
        Advice::RaiseBandwidth { bytes_per_second } => {
            let gigabytes = *bytes_per_second as f64 / 1e9;
            format!("send at {gigabytes:.2} GB/s or more: raise max-bandwidth, or use a faster link")
        }
        Advice::MoreChannels => {
            "if the link is not full, switch multifd on and raise multifd-channels".to_owned()
        }
        Advice::AutoConverge { percent } => format!(
            "switch auto-converge on, with max-cpu-throttle at {percent} or above: it slows the guest down as far as \
             necessary"
        ),
        Advice::Postcopy => "use postcopy, which ends at any dirty rate: switch postcopy-ram on, on both sides, and \
                             set x-sterna-non-convergence to postcopy, or run migrate-start-postcopy (`sterna migrate \
                             --postcopy` does both). Until all pages have arrived, the guest runs more slowly at the \
                             destination, and depends on both hosts and the link"
            .to_owned(),
        // The text contains no name of a setting, or belongs to a later engine.
        other => other.to_string(),
    }
}

fn of_settings(error: &SettingsError) -> String {
    let sentence = match error {
        SettingsError::NoChannels => "multifd-channels is 0: give 1 to 255, or switch multifd off",
        SettingsError::FileIsOneChannel => {
            "Migration requires multi-channel URIs: switch multifd off, or mapped-ram on"
        }
        SettingsError::DescriptorIsOneChannel => {
            "a descriptor (fd:) is one channel: switch multifd off, or give tcp: or unix:"
        }
        SettingsError::CannotReconnect { over } => {
            return format!(
                "a lost connection over {over} cannot be replaced: set x-sterna-reconnect-window to 0, or give tcp: \
                 or unix:"
            );
        }
        SettingsError::FileHasNoTls => "a file does not support TLS: leave tls-creds empty",
        SettingsError::FileDoesNotAnswer => {
            "switchover-ack needs a destination that answers, which a file does not: switch it off"
        }
        SettingsError::MappedNeedsFile => {
            "Migration requires seekable transport (e.g. file:) with mapped-ram: switch it off"
        }
        SettingsError::MappedIsUncompressed => {
            "Cannot use compression with mapped-ram: set multifd-compression to none"
        }
        SettingsError::RdmaHasNoTls => {
            "rdma: does not support TLS, because adapters write memory unencrypted: leave tls-creds empty, or use tcp:"
        }
        SettingsError::RdmaIsUncompressed => {
            "rdma: does not support compressed pages, because adapters write pages directly to their place: set \
             multifd-compression to none"
        }
        SettingsError::WrongCredentials { needed: TlsEndpoint::Client } => {
            "tls-creds are for the endpoint server, but a source connects: use credentials for the endpoint client"
        }
        SettingsError::WrongCredentials { needed: TlsEndpoint::Server } => {
            "tls-creds are for the endpoint client, but a destination listens: use credentials for the endpoint server"
        }
        SettingsError::TwoThrottles => "dirty-limit conflicts with auto-converge: switch one of them off",
        SettingsError::AckNeedsReturnPath => {
            "switchover-ack needs return-path, which carries the acknowledgement: switch it on, too"
        }
        SettingsError::NoThrottle => "this VM cannot be slowed down: switch auto-converge off",
        SettingsError::NoDirtyLimit => {
            "dirty-limit needs a VM that counts the dirty pages of each vCPU: start it with a dirty ring \
             (dirty-ring-size), or use auto-converge"
        }
        SettingsError::CprExcludes { .. } => return error.to_string().replace('_', "-"),
        // The text contains no name of a setting, or belongs to a later engine.
        other => return other.to_string(),
    };
    sentence.to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_are_called_by_the_names_that_the_monitor_takes() {
        for (error, name) in [
            (SettingsError::NoChannels, "multifd-channels"),
            (SettingsError::FileIsOneChannel, "mapped-ram"),
            (SettingsError::FileDoesNotAnswer, "switchover-ack"),
            (SettingsError::MappedIsUncompressed, "multifd-compression"),
            (SettingsError::RdmaHasNoTls, "tls-creds"),
            (SettingsError::RdmaIsUncompressed, "multifd-compression"),
            (SettingsError::CannotReconnect { over: "rdma:" }, "x-sterna-reconnect-window"),
            (SettingsError::WrongCredentials { needed: TlsEndpoint::Server }, "tls-creds"),
            (SettingsError::TwoThrottles, "auto-converge"),
            (SettingsError::AckNeedsReturnPath, "return-path"),
            (SettingsError::NoDirtyLimit, "dirty-ring-size"),
            (SettingsError::CprNeedsUnix, "mode"),
            (SettingsError::CprExcludes { what: "mapped_ram" }, "mapped-ram"),
        ] {
            let text = sentence(&StartError::Settings(error));
            assert!(text.contains(name) && !text.contains('_'), "{text}");
        }
    }

    #[test]
    fn advice_calls_settings_by_the_names_that_the_monitor_takes() {
        for (of, name) in [
            (Advice::RaiseDowntimeLimit { milliseconds: 20 }, "downtime-limit to 20 ms"),
            (
                Advice::RaiseBandwidth { bytes_per_second: 2_500_000_000 },
                "2.50 GB/s or more: raise max-bandwidth",
            ),
            (Advice::MoreChannels, "multifd-channels"),
            (Advice::AutoConverge { percent: 40 }, "max-cpu-throttle at 40"),
            (Advice::Throttle { percent: 40 }, "40 %"),
            (Advice::Postcopy, "x-sterna-non-convergence"),
        ] {
            let text = advice(&of);
            assert!(text.contains(name), "{text}");
        }
    }
}
