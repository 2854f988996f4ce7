"use strict";
// Has the figures of the page fetched again, if that is asked for. Without it, the page is reloaded by hand.
document.addEventListener("DOMContentLoaded", () => {
    const refresh = document.querySelector(".refresh");
    if (!refresh) {
        return;
    }
    const box = refresh.querySelector("input");
    const said = refresh.querySelector("[role=status]");
    const kept = "django-idempotency-refresh";
    const period = Number(refresh.dataset.seconds) * 1000;
    let timer = null;
    let busy = false;

    const tell = (text) => {
        said.textContent = text.replace("{time}", new Date().toLocaleTimeString(document.documentElement.lang || undefined));
    };

    // What was unfolded, scrolled or focused stays so.
    const exchange = (fresh) => {
        const old = document.querySelector("[data-live]");
        const unfolded = new Set([...old.querySelectorAll("details[open]")].map((each) => each.id));
        const scrolled = [...old.querySelectorAll(".scrolled")].map((each) => [each.scrollTop, each.scrollLeft]);
        const places = [...old.querySelectorAll("a, summary, [tabindex]")];
        const place = places.indexOf(document.activeElement);
        for (const each of fresh.querySelectorAll("details")) {
            each.open = unfolded.has(each.id);
        }
        old.replaceWith(document.adoptNode(fresh));
        fresh.querySelectorAll(".scrolled").forEach((each, number) => {
            [each.scrollTop, each.scrollLeft] = scrolled[number] ?? [0, 0];
        });
        if (place >= 0) {
            fresh.querySelectorAll("a, summary, [tabindex]")[place]?.focus({ preventScroll: true });
        }
    };

    const fetchAgain = async () => {
        if (busy || document.hidden) {
            return;
        }
        busy = true;
        try {
            const response = await fetch(location.href, { cache: "no-store", signal: AbortSignal.timeout(period) });
            const page = new DOMParser().parseFromString(await response.text(), "text/html");
            const fresh = page.querySelector("[data-live]");
            if (!response.ok || !fresh) { // an error, or the login
                throw new Error(response.statusText);
            }
            exchange(fresh);
            tell(refresh.dataset.done);
        } catch {
            tell(refresh.dataset.failed);
        } finally {
            busy = false;
        }
    };

    const start = () => {
        clearInterval(timer);
        timer = box.checked ? setInterval(fetchAgain, period) : null;
    };

    box.checked = sessionStorage.getItem(kept) === "on";
    box.addEventListener("change", () => {
        sessionStorage.setItem(kept, box.checked ? "on" : "off");
        said.textContent = "";
        start();
        if (box.checked) {
            fetchAgain();
        }
    });
    document.addEventListener("visibilitychange", () => {
        if (box.checked && !document.hidden) {
            fetchAgain();
        }
    });
    refresh.hidden = false;
    start();
});
