//! Why the engine refuses to start, with the settings under QEMU's names.

use sterna::{SettingsError, StartError, TlsEndpoint};

/// The sentence for an operator, who knows settings by QEMU's names.
pub fn sentence(why: &StartError) -> String {
    match why {
        StartError::Settings(error) => of_settings(error),
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
        SettingsError::WrongCredentials { needed: TlsEndpoint::Client } => {
            "tls-creds are for the endpoint server, and a source connects: give it ones for client"
        }
        SettingsError::WrongCredentials { needed: TlsEndpoint::Server } => {
            "tls-creds are for the endpoint client, and a destination listens: give it ones for server"
        }
        SettingsError::TwoThrottles => "dirty-limit conflicts with auto-converge: switch one of them off",
        SettingsError::AckNeedsReturnPath => {
            "switchover-ack needs return-path: the acknowledgement comes on it"
        }
        SettingsError::NoThrottle => "this VM cannot be slowed down: switch auto-converge off",
        SettingsError::NoDirtyLimit => {
            "dirty-limit needs a VM that counts what each vCPU dirties: start it with a dirty ring \
             (dirty-ring-size), or use auto-converge"
        }
        // Says nothing of a setting by its name, or is of a later engine.
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
            (SettingsError::WrongCredentials { needed: TlsEndpoint::Server }, "tls-creds"),
            (SettingsError::TwoThrottles, "auto-converge"),
            (SettingsError::AckNeedsReturnPath, "return-path"),
            (SettingsError::NoDirtyLimit, "dirty-ring-size"),
        ] {
            let text = sentence(&StartError::Settings(error));
            assert!(text.contains(name) && !text.contains('_'), "{text}");
        }
    }
}
