//! A network card on the command line: `tap:NAME[,mac=ADDRESS][,queues=N]`.

use sterna_vmm::NetOptions;

/// Parses the argument of `--net`.
pub fn parse(text: &str) -> Result<NetOptions, String> {
    let mut words = text.split(',');
    let tap = words.next().and_then(|word| word.strip_prefix("tap:")).filter(|name| !name.is_empty());
    let mut card = NetOptions::new(tap.ok_or("give a tap interface of the host: `tap:NAME`")?);
    for word in words {
        match word.split_once('=') {
            Some(("mac", address)) => card.mac = Some(address.parse()?),
            Some(("queues", value)) => {
                let most = NetOptions::QUEUES_MAX;
                let queues = value.parse().ok().filter(|queues| (1..=most).contains(queues));
                card.queues = queues.ok_or_else(|| format!("queues={value}: a number from 1 to {most}"))?;
            }
            Some((name, _)) => return Err(format!("unknown option `{name}`: use mac or queues")),
            None => return Err(format!("`{word}` is not an option: write `name=value`")),
        }
    }
    Ok(card)
}

#[cfg(test)]
mod tests {
    use sterna_vmm::MacAddress;

    use super::*;

    #[test]
    fn card_has_a_tap_and_perhaps_an_address() {
        assert_eq!(parse("tap:vmtap0").unwrap(), NetOptions::new("vmtap0"));
        let card = parse("tap:t,mac=52:54:00:0a:ff:01").unwrap();
        assert_eq!(parse("tap:t,queues=4").unwrap().queues, 4);
        assert_eq!(card.mac, Some(MacAddress([0x52, 0x54, 0, 0x0a, 0xff, 1])));
    }

    #[test]
    fn wrong_card_is_refused_with_the_reason() {
        for (text, says) in [
            ("vmtap0", "tap:NAME"),
            ("tap:", "tap:NAME"),
            ("tap:t,mac=52:54:00:0a:ff", "six pairs"),
            ("tap:t,mac=52:54:00:0a:ff:+1", "six pairs"),
            ("tap:t,mac=01:00:5e:00:00:01", "multicast"),
            ("tap:t,speed=1", "`speed`"),
            ("tap:t,x", "`x`"),
            ("tap:t,queues=5", "from 1 to 4"),
        ] {
            let why = parse(text).unwrap_err();
            assert!(why.contains(says), "{text}: {why}");
        }
    }
}
