//! Advice on the reasons that VMs give for a failed migration.

/// Advice on a VM's reason, if the reason does not contain advice.
pub(super) fn advice(why: &str) -> Option<&'static str> {
    let has = |words: &str| why.contains(words);
    // The texts of QEMU's TLS library and of Sterna's.
    if (has("does not match the hostname") || has("not valid for name")) && !has("tls-hostname") {
        return Some(
            ". The destination's certificate is for another host name than the address: give the name in the \
             certificate with `--set tls-hostname=NAME`",
        );
    }
    let name = crate::tls::name_advice(why, crate::tls::NAME_PARAMETER);
    if !name.is_empty() {
        return Some(name);
    }
    // QEMU's text for an answer that reports a failure.
    (has("Sibling indicated error") && !has("the destination")).then_some(
        ". The destination has refused the guest. Its log contains the reason; with `--dest-qmp SOCKET` this command \
         asks for it",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn certificate_of_another_name_points_to_the_parameter_once() {
        for why in [
            "Certificate does not match the hostname 127.0.0.1",
            "invalid peer certificate: certificate not valid for name \"127.0.0.1\"",
            "it is for other, not for \"127.0.0.1\": set the expected host name to that, or connect by that name",
        ] {
            assert!(advice(why).is_some_and(|text| text.contains("--set tls-hostname=")), "{why}");
        }
        let refused = "Sibling indicated error 1";
        assert!(advice(refused).is_some_and(|text| text.contains("--dest-qmp")));
        assert_eq!(advice(&format!("{refused}; the destination reports: no such device")), None);
        for why in ["The certificate has expired", "not valid for name x: set tls-hostname"] {
            assert_eq!(advice(why), None, "{why}");
        }
    }
}
